"""Every error a user of fsdp_ciera can meet, by name.

An error message states the fact, the value received, and the call that fixes it. Errors about something that can
differ between ranks are raised on all ranks of the process group together.

This module imports nothing: every other one may import it, the kernels too.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


class UnsupportedTorchError(ImportError):
    """This torch has no FSDP2 custom all-gather that fsdp_ciera knows how to use: install torch 2.9 to 2.14."""


class CieraPolicyError(ValueError):
    """A `CieraPolicy` field, or the way a policy is applied, is not allowed: give one of the values that the message names."""


class CieraConflictError(RuntimeError):
    """Another custom all-gather already sits on the module, or replaced ours after we set it: keep one of the two."""


class CieraMismatchError(RuntimeError):
    """Ranks of a process group disagree about policy, versions or layout: give all the same. Raised at the first gather."""


class CieraDesyncError(RuntimeError):
    """Ranks of a process group are not at the same gather of the same module: let all run the same modules in one order."""


class CieraPeerError(RuntimeError):
    """A rank could not encode its shard: the message names the rank and its exception, which is the one to look into."""


class CieraDecodeError(RuntimeError):
    """A payload is not what its head announces, so it was damaged on the way: look at memory and network of the ranks."""


class CieraVerifyError(RuntimeError):
    """`verify=` found decoded bytes that differ from the sender's: report it, and train with codecs=("raw",) until then."""


class CieraKernelError(RuntimeError):
    """The CUDA kernels cannot run on this device, or a launch does not fit the kernel it names: the message says what would."""


class RecipeError(ValueError):
    """A recipe file has an unknown key or a value that is not allowed: the message names the key and what it allows."""


class UnitError(ValueError):
    """A text is not the size, rate, speed, time or number that is wanted: the message says how to write one."""


class CieraFileError(OSError):
    """A file or model folder cannot be read, written or understood: the message names the path, and what it should hold."""


class MissingPackageError(ImportError):
    """A package that this command needs is not installed: the message has the pip command that installs it."""


class SimulationError(ValueError):
    """An input of the simulator cannot be used: the message says which, and what is allowed."""


class ReportError(ValueError):
    """Results cannot be shown, drawn or compared as asked: the message says what they lack."""


class PeerError(ValueError):
    """A rival of the measuring stand cannot run like this: the message says which setting it needs, or leave it out."""


class MissingPeerError(PeerError):
    """A rival's package is not installed: install fsdp-ciera[rivals], or leave the rival out."""


class NetnsError(RuntimeError):
    """Network namespaces with limited links cannot be made here: run as root on Linux with iproute2, or use --loopback."""


class GatherError(ValueError):
    """An option of `ciera bench gather` is not allowed: the message names the option and what it allows."""


class RankError(RuntimeError):
    """A rank ended with an error or the run took too long: the message has what it wrote last, `results` its whole output."""

    def __init__(self, message: str, results: Sequence[Any]) -> None:
        super().__init__(message)
        self.results = results
        """The `fsdp_ciera.bench.ranks.RankResult` of each rank."""


class RankFailure(AssertionError):
    """A rank of `run_ranks` raised, died or ran out of time: the message has the traceback of each that failed."""
