"""`python -m deploy.healthy ADDRESS`: exits with status 0 if the service there is healthy, for supervisors that run a
command.

ADDRESS is that of a gRPC server with health ("unix:/run/prism/balloond.sock", "127.0.0.1:8001") or the path of a
SEQPACKET socket whose owner serves it (the keeper's). If TCP is mTLS, PRISM_TLS_CA, PRISM_TLS_CERTIFICATE,
PRISM_TLS_KEY and PRISM_TLS_SERVER_NAME name what is shown to the server (docs/operate/security.md).
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import sys

from services.errors import PrismError
from services.ipc import seqpacket
from services.ipc.sockets import unix_path
from services.rpc import rpc, tls


async def healthy(address: str, timeout_s: float) -> bool:
    """Whether the service answers within `timeout_s` seconds; False if there is nothing yet."""
    path = unix_path(address)
    if path is None and address.startswith("/"):
        return await asyncio.to_thread(_answers, address, timeout_s)
    if path is not None and not os.path.exists(path):
        return False
    return await rpc.healthy(address, timeout_s)


def _answers(path: str, timeout_s: float) -> bool:
    """Whether the process that listens there ends the connection when this side does. That a connection is made says
    nothing: the kernel does that for a process that hangs as well."""
    try:
        with contextlib.closing(seqpacket.connect(path, timeout_s)) as there:
            there.settimeout(timeout_s)
            there.shutdown(socket.SHUT_WR)
            while there.recv(1 << 16):
                pass
    except OSError:
        return False
    return True


def main() -> None:
    if len(sys.argv) != 2 or not (sys.argv[1].startswith("/") or ":" in sys.argv[1]):
        sys.exit("usage: python -m deploy.healthy unix:/SOCKET | HOST:PORT | /SEQPACKET-SOCKET")
    try:
        rpc.identify(tls.from_environment())
    except PrismError as error:
        sys.exit(str(error))
    if not asyncio.run(healthy(sys.argv[1], timeout_s=3.0)):
        sys.exit(f"{sys.argv[1]} is not healthy")


if __name__ == "__main__":
    main()
