"""Errors of the engine's commands and requests; the attributes of a CommandError decide what the gpu_scheduler does
next."""

from __future__ import annotations


class CommandError(Exception):
    """A command failed and the engine goes on. `str(error)` is one line for the gpu_scheduler.

    `model_at_fault`: the checkpoint is unusable, so trying again cannot help. `may_pass`: trying again may help.
    `weights_differ`: the weights are not those announced.
    """

    model_at_fault = False
    may_pass = False
    weights_differ = False
    settled = False
    """True once every rank of the engine has raised this error."""


class BrokenModel(CommandError):
    """The checkpoint or its architecture is unusable: trying again cannot help."""

    model_at_fault = True


class HostFault(CommandError):
    """A file could not be read, or the host had too little of some resource; the cause may pass."""

    may_pass = True


class WrongWeights(CommandError):
    """The weights range does not hold what was announced."""

    weights_differ = True


class NotNow(CommandError):
    """The engine's state does not allow the command."""


class NoMemory(CommandError):
    """balloond gave no lease or not enough extents."""


class RejectedRequest(Exception):
    """The request itself is impossible."""


class LeaveLoop(Exception):
    """Unwinds SGLang's event loop between two steps: the model leaves, or the process ends."""
