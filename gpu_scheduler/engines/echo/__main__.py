"""`python -m gpu_scheduler.engines.echo --channel-fd N`: started by a gpu_scheduler, never by hand."""

from __future__ import annotations

import argparse

from gpu_scheduler.engines.echo.engine import EchoEngine
from protos import engine_pb2
from services.ipc.framing import BlockingChannel
from services.telemetry import log


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--channel-fd", type=int, required=True, help="our end of the socket to the gpu_scheduler")
    parser.add_argument("--board-fd", type=int, help="of the shared board, which this engine does not use")
    parser.add_argument("--board-index", type=int, default=0, help="its number there")
    parser.add_argument("--log-level", default="warning")
    arguments = parser.parse_args()
    log.configure("echo-engine", arguments.log_level)
    channel = BlockingChannel(arguments.channel_fd, engine_pb2.ToEngine)
    EchoEngine(channel).run()


if __name__ == "__main__":
    main()
