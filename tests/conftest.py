"""What every test runs under."""

from __future__ import annotations

import signal

# A shell's background job starts with SIGINT ignored, and so would every process that the tests start and interrupt.
signal.signal(signal.SIGINT, signal.default_int_handler)
