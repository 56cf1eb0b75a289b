"""`python -m gpu_scheduler.engines.sglang --channel-fd N`: started by a gpu_scheduler, never by hand."""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import logging
import os
import traceback
from collections.abc import Iterator
from typing import TYPE_CHECKING

from gpu_scheduler.engines.sglang.base import environment

if TYPE_CHECKING:
    from gpu_scheduler.engines.sglang.memory.model_memory import OpenMemory


def main(arguments: list[str] | None = None, open_memory: OpenMemory | None = None) -> None:
    """Runs one engine process until its gpu_scheduler ends it. `open_memory` replaces balloond as the source of memory,
    for tests."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--channel-fd", type=int, help="our end of the socket to the gpu_scheduler")
    parser.add_argument("--ranks", type=int, default=1, help="processes of this engine, one for each of its devices")
    parser.add_argument("--rank", type=int, default=0, help="which of them this is; the first has the channel")
    parser.add_argument("--rank-fds", default="", help="sockets: of the first to the others, of these to the first")
    parser.add_argument("--rendezvous-fd", type=int, help="shared memory where process groups find each other")
    parser.add_argument("--board-fd", type=int, help="shared board of the engines on these devices")
    parser.add_argument("--board-index", type=int, default=0, help="this engine's number on the shared board")
    parser.add_argument("--log-level", default="warning")
    given = parser.parse_args(arguments)
    environment.die_with_parent()
    environment.prepare(given.ranks, given.rendezvous_fd)
    faulthandler.enable()

    from gpu_scheduler.engines.sglang.base import collector

    collector.pause()  # until all is imported: it would look at the growing heap again and again, for a second or two
    from gpu_scheduler.engines import shared_board
    from gpu_scheduler.engines.sglang import plugin
    from gpu_scheduler.engines.sglang.base import kernels
    from gpu_scheduler.engines.sglang.ranks.channel import Channel, FollowerChannel, LeaderChannel
    from gpu_scheduler.engines.sglang.ranks.ranks import Alone, Follower, Leader, Ranks
    from gpu_scheduler.engines.shared_board import BoardSeat, SharedBoard
    from services.telemetry import log

    log.configure("sglang-engine", given.log_level)
    log.bind(engine=os.getpid())  # all engines of a group log to the same place
    if given.ranks > 1:
        log.bind(rank=given.rank)
    if given.log_level not in ("debug", "info"):
        logging.getLogger("sglang").setLevel(logging.ERROR)
        # The reason for refusing a request, such as a bad grammar, goes to its client; it is no error of the engine's.
        refusals = logging.getLogger("sglang.srt.managers.schedule_batch")
        refusals.addFilter(lambda record: "self.rid=" not in record.getMessage())
    else:
        collector.say_pauses()
    plugin.load()
    if environment.has_gpu():
        kernels.take_all_numbers()

    from gpu_scheduler.engines.sglang.engine import ModelHost
    from gpu_scheduler.engines.sglang.memory import on_balloond

    # Rank 0 speaks for all. The others, and an engine without neighbours, have a board of their own.
    alone = given.board_fd is None or given.rank > 0
    board_fd = shared_board.create() if alone else given.board_fd
    seat = BoardSeat(SharedBoard(board_fd), given.board_index)
    fds = [int(fd) for fd in given.rank_fds.split(",") if fd]
    channel: Channel | FollowerChannel
    ranks: Ranks
    if given.ranks == 1:
        ranks = Alone()
        channel = Channel(given.channel_fd)
    elif given.rank == 0:
        ranks = leader = Leader(fds)
        channel = LeaderChannel(given.channel_fd, leader)
    else:
        ranks = follower = Follower(fds[0], given.rank, given.ranks)
        channel = FollowerChannel(follower)
    if environment.has_gpu():
        kernels.Compilations(lambda told: channel.send(compiling=told)).watch()
    with contextlib.nullcontext() if given.ranks == 1 else _leaving_at_once():
        ModelHost(channel, ranks, seat, open_memory or on_balloond.open_memory).run()


@contextlib.contextmanager
def _leaving_at_once() -> Iterator[None]:
    """Ends the process at once if its rank fails inside: at the interpreter's end it could wait for the other ranks in
    what it shares with them, and the gpu_scheduler needs its death to end the rest."""
    try:
        yield
    except BaseException:
        traceback.print_exc()
        os._exit(1)


if __name__ == "__main__":
    main()
