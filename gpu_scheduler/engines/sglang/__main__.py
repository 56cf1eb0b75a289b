"""`python -m gpu_scheduler.engines.sglang --channel-fd N`: started by a gpu_scheduler, never by hand."""

from __future__ import annotations

import argparse
import faulthandler
import logging
from typing import TYPE_CHECKING

from gpu_scheduler.engines.sglang import environment

if TYPE_CHECKING:
    from gpu_scheduler.engines.sglang.memory import OpenMemory


def main(arguments: list[str] | None = None, open_memory: OpenMemory | None = None) -> None:
    """`open_memory`: another source of memory than balloond, for tests."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--channel-fd", type=int, required=True, help="our end of the socket to the gpu_scheduler")
    parser.add_argument("--turn-fd", type=int, help="shared memory of the prefill turn")
    parser.add_argument("--turn-index", type=int, default=0, help="this engine's number on the turn word")
    parser.add_argument("--log-level", default="warning")
    given = parser.parse_args(arguments)
    environment.die_with_parent()
    environment.prepare()
    faulthandler.enable()

    from gpu_scheduler.engines.sglang import plugin
    from gpu_scheduler.engines.sglang.channel import Channel
    from gpu_scheduler.engines.turn import Turn
    from services import log

    log.configure("sglang-engine", given.log_level)
    if given.log_level not in ("debug", "info"):
        logging.getLogger("sglang").setLevel(logging.ERROR)
    plugin.load()

    from gpu_scheduler.engines.sglang import on_balloond
    from gpu_scheduler.engines.sglang.engine import Engine

    turn = None if given.turn_fd is None else Turn(given.turn_fd)
    Engine(Channel(given.channel_fd), turn, given.turn_index, open_memory or on_balloond.open_memory).run()


if __name__ == "__main__":
    main()
