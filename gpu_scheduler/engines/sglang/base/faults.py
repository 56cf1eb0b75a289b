"""Decides whether the model or the host is at fault when a checkpoint could not be used, by the type of the exception
that was raised first: SGLang and its libraries wrap it in many other types on the way up."""

from __future__ import annotations

import os
from pathlib import Path

from gpu_scheduler.engines.sglang.base.errors import BrokenModel, CommandError, HostFault
from gpu_scheduler.engines.sglang.base.options import one_line
from services.errors import first_of_chain


def check_folder(path: str) -> None:
    """Raises HostFault for a model folder that cannot be read now: SGLang would take its path for a name, and look for
    a model of that name elsewhere."""
    try:
        os.stat(path)
    except FileNotFoundError:
        raise HostFault("its folder does not exist") from None
    except OSError as error:
        raise HostFault(f"its folder: {error.strerror}") from None
    try:
        with open(Path(path) / "config.json", "rb") as file:
            file.read(1)
    except FileNotFoundError:
        raise HostFault("its folder has no config.json") from None
    except OSError as error:
        raise HostFault(f"config.json: {error.strerror}") from None


def fault(error: BaseException, path: str) -> CommandError:
    """The CommandError that the gpu_scheduler gets for `error`, raised while the model in folder `path` was built:
    HostFault if the cause may pass, else BrokenModel."""
    first = first_of_chain(error)
    if isinstance(first, OSError) and first.errno:
        name = Path(os.fsdecode(first.filename)).name if first.filename else ""
        return HostFault(f"{name}: {first.strerror}" if name else f"{first.strerror}")
    # Torch raises RuntimeError when the host has too little memory, and so do kernels that could not be made. A
    # checkpoint's own faults, such as shapes that do not fit, are found by the loader and by SGLang.
    passes = isinstance(first, (OSError, MemoryError)) or type(first) is RuntimeError
    told = one_line(error).replace(path, Path(path).name)
    return HostFault(told) if passes else BrokenModel(told)
