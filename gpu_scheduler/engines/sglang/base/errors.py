"""Why a command of the engine failed, each with its fate."""

from __future__ import annotations


class CommandError(Exception):
    """The command failed; the engine goes on. `str(error)` is one line for the gpu_scheduler."""

    model_at_fault = False
    may_pass = False
    weights_differ = False
    settled = False
    """Every rank of the engine has raised it."""


class BrokenModel(CommandError):
    """The checkpoint or its architecture: trying again cannot help."""

    model_at_fault = True


class HostFault(CommandError):
    """A file could not be read, or the host had too little of something: it may be over in a moment."""

    may_pass = True


class WrongWeights(CommandError):
    """The weights range does not hold what was announced."""

    weights_differ = True


class NotNow(CommandError):
    """The engine's state does not allow it."""


class NoMemory(CommandError):
    """balloond gave no lease or not enough extents."""


class RejectedRequest(Exception):
    """The request itself is impossible."""


class LeaveLoop(Exception):
    """Unwinds SGLang's event loop between two steps: the model leaves, or the process ends."""
