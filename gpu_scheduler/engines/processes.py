"""Starts the processes of one engine: one, or one for each of its devices, which find each other through descriptors
that they inherit."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import sys
from collections.abc import Mapping, Sequence

from services.ipc import children


async def start(
    module: str,
    arguments: Sequence[str],
    channel: socket.socket,
    *,
    ranks: int = 1,
    shared_fds: Sequence[int] = (),
    environment: Mapping[str, str] | None = None,
) -> list[children.Process]:
    """Starts the processes and returns them by rank. The first gets `channel`, which stays the caller's to close; all
    get `shared_fds`. If one does not start, the others are killed and its error is raised."""
    command = [sys.executable, "-m", module, *arguments]
    with contextlib.ExitStack() as stack:
        if ranks > 1:
            rendezvous = os.memfd_create("prism-ranks")
            stack.callback(os.close, rendezvous)
            command += ["--ranks", str(ranks), "--rendezvous-fd", str(rendezvous)]
            shared_fds = [*shared_fds, rendezvous]
        pairs = [socket.socketpair() for _ in range(ranks - 1)]
        for one in (end for pair in pairs for end in pair):
            stack.enter_context(one)
        firsts = [first.fileno() for first, _ in pairs]
        own = [["--channel-fd", str(channel.fileno())]]
        if ranks > 1:
            own[0] += ["--rank-fds", ",".join(map(str, firsts))]
        passed = [[channel.fileno(), *firsts]]
        for rank, (_, other) in enumerate(pairs, start=1):
            own.append(["--rank", str(rank), "--rank-fds", str(other.fileno())])
            passed.append([other.fileno()])
        processes: list[children.Process] = []
        try:
            for parts, fds in zip(own, passed, strict=True):
                process = await children.start(
                    *command,
                    *parts,
                    pass_fds=[*fds, *shared_fds],
                    stdin=asyncio.subprocess.DEVNULL,
                    env={**os.environ, **(environment or {})},
                    # Ctrl-C at a terminal goes to the gpu_scheduler, which ends its engines in order.
                    start_new_session=True,
                )
                processes.append(process)
        except BaseException:
            kill(processes)
            raise
        return processes


def kill(processes: Sequence[children.Process]) -> None:
    for process in processes:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
