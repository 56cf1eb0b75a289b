"""Models of the Hugging Face hub among those that a user names: they are fetched first, and then they are folders."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Collection, Sequence
from typing import Any

from deploy.hub import names
from deploy.local.processes import die_with_parent
from services.errors import Unmet
from services.wording.plurals import agreeing


async def fetched(
    models: Sequence[str], kind: str, stopping: asyncio.Future[Any], unverified: Collection[str] = ()
) -> list[str]:
    """The models as "PATH" or "NAME=PATH", those of the hub fetched by a process that prints what it does, and why it
    cannot. `kind`: "cpu" or "cuda"; `unverified`: names of models that may be of a class that nobody has compared.
    Raises Invalid for a name that makes no sense, and Unmet if one cannot be fetched; returns early, with those that
    need no fetching, when `stopping` is done."""
    of_hub = {argument: found for argument in models if (found := names.of_argument(argument)) is not None}
    folders: dict[str, str] = {}
    if of_hub:
        unseen = [f"--unverified-model={model}" for name, model in of_hub.values() if name in unverified]
        wanted = [str(model) for _, model in of_hub.values()]
        fetched_folders = await _fetch([*unseen, *wanted], kind, stopping)
        if fetched_folders is None:
            no_folder = agreeing(
                len(wanted),
                "is no folder here and was taken for a model",
                "are no folders here and were taken for models",
            )
            raise Unmet(f"nothing was started: {', '.join(wanted)} {no_folder} of the Hugging Face hub")
        folders = dict(zip(of_hub, fetched_folders, strict=False))  # fewer, if it was stopped
    return [
        f"{of_hub[argument][0]}={folders[argument]}" if argument in folders else argument
        for argument in models
        if argument in folders or argument not in of_hub
    ]


async def _fetch(arguments: Sequence[str], kind: str, stopping: asyncio.Future[Any]) -> list[str] | None:
    """The folders of fetched models, fewer if it was stopped; None: one cannot be fetched, and the process that tried
    has printed why."""
    child = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "deploy.hub", "--whole", "--device", kind, *arguments),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        start_new_session=True,  # Ctrl-C reaches the launcher alone, which ends the process
        preexec_fn=die_with_parent,
    )
    ended = asyncio.get_running_loop().create_task(child.communicate())
    await asyncio.wait([ended, stopping], return_when=asyncio.FIRST_COMPLETED)
    if not ended.done():
        child.terminate()
    out, _ = await ended
    if child.returncode != 0 and not stopping.done():
        return None
    return os.fsdecode(out).splitlines()
