"""Every error a user of fsdp_ciera can meet, by name.

An error message states the fact, the value received, and the call that fixes it. Errors about something that can
differ between ranks are raised on all ranks of the process group together.
"""

from __future__ import annotations


class UnsupportedTorchError(ImportError):
    """This torch has no FSDP2 custom all-gather that fsdp_ciera knows how to use (torch 2.9 to 2.14 have)."""


class CieraPolicyError(ValueError):
    """A `CieraPolicy` field, or the way a policy is applied, is not allowed."""


class CieraConflictError(RuntimeError):
    """Another custom all-gather already sits on the module, or replaced ours behind our back."""


class CieraMismatchError(RuntimeError):
    """The ranks of a group disagree about policy, versions or layout. Raised on all ranks at the first gather."""


class CieraDesyncError(RuntimeError):
    """The ranks of a group are not at the same gather of the same module. Raised on all ranks together."""


class CieraPeerError(RuntimeError):
    """A rank could not encode its shard. Raised on all ranks together, naming the rank and its exception."""


class CieraDecodeError(RuntimeError):
    """A payload is not what its header and section table announce: it was damaged on the way."""


class CieraVerifyError(RuntimeError):
    """`verify=` found decoded bytes that differ from the sender's. Raised on all ranks together."""


class RecipeError(ValueError):
    """A recipe file has an unknown key or a value that is not allowed."""
