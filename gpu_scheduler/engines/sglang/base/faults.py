"""Whose fault it was that a checkpoint could not be used, by the kind of what was raised first: what SGLang and its
libraries make of it on the way up has many kinds."""

from __future__ import annotations

import os
from pathlib import Path

from gpu_scheduler.engines.sglang.base.errors import BrokenModel, CommandError, HostFault
from gpu_scheduler.engines.sglang.base.options import one_line


def check_folder(path: str) -> None:
    """Raises HostFault for a folder that cannot be read now: SGLang would take its path for a name, and look for a
    model of that name elsewhere."""
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
    """As a gpu_scheduler is told it, of a model in the folder `path`."""
    first = _first(error)
    if isinstance(first, OSError) and first.errno:
        name = Path(os.fsdecode(first.filename)).name if first.filename else ""
        return HostFault(f"{name}: {first.strerror}" if name else f"{first.strerror}")
    # Torch says in a RuntimeError that it got no memory of the host, and its kernels that they could not be made. What
    # would be the checkpoint's, shapes that do not fit say, the loader has looked for, and SGLang does.
    passes = isinstance(first, (OSError, MemoryError)) or type(first) is RuntimeError
    told = one_line(error).replace(path, Path(path).name)
    return HostFault(told) if passes else BrokenModel(told)


def _first(error: BaseException) -> BaseException:
    """What was raised while nothing else was being handled."""
    seen = {id(error)}
    while (before := error.__cause__ or error.__context__) is not None and id(before) not in seen:
        seen.add(id(before))
        error = before
    return error
