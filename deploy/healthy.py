"""`python -m deploy.healthy ADDRESS`: status 0 when the service there is healthy, for supervisors that run a command.

ADDRESS is that of a gRPC server with health ("unix:/run/prism/balloond.sock", "127.0.0.1:8001") or the path of a
SEQPACKET socket that accepts (the keeper's).
"""

from __future__ import annotations

import asyncio
import os
import sys

from services import rpc, seqpacket
from services.sockets import unix_path


async def healthy(address: str, timeout_s: float) -> bool:
    """Whether it answers within the time; False where there is nothing yet."""
    path = unix_path(address)
    if path is None and address.startswith("/"):
        try:
            seqpacket.connect(address, timeout_s).close()
        except OSError:
            return False
        return True
    if path is not None and not os.path.exists(path):
        return False
    return await rpc.healthy(address, timeout_s)


def main() -> None:
    if len(sys.argv) != 2 or not (sys.argv[1].startswith("/") or ":" in sys.argv[1]):
        sys.exit("usage: python -m deploy.healthy unix:/SOCKET | HOST:PORT | /SEQPACKET-SOCKET")
    if not asyncio.run(healthy(sys.argv[1], timeout_s=3.0)):
        sys.exit(f"{sys.argv[1]} is not healthy")


if __name__ == "__main__":
    main()
