"""What a user of the simulator can get wrong."""

from __future__ import annotations


class SimulationError(ValueError):
    """An input of the simulator cannot be used; the message says which, and what is allowed."""
