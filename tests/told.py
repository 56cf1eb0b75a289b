"""`python -m tests.told STATUS ...`: says what a process was started with, and ends with that status."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
from pathlib import Path


def told() -> dict[str, object]:
    descriptors = {}
    for fd in sorted(map(int, os.listdir("/proc/self/fd"))):
        with contextlib.suppress(OSError):  # that of the list itself is closed again
            if fd > 2:
                descriptors[fd] = os.readlink(f"/proc/self/fd/{fd}")
    return {
        "name": __name__,
        "arguments": sys.argv,
        "path": sys.path[0],
        "command": Path("/proc/self/cmdline").read_bytes().rstrip(b"\0").decode().split("\0"),
        "environment": dict(os.environ),
        "folder": os.getcwd(),
        "descriptors": descriptors,
        "parent": os.getppid(),
        "leads": os.getsid(0) == os.getpid(),
        "interrupt": signal.getsignal(signal.SIGINT) is signal.default_int_handler,
        "input": sys.stdin.read(),
        "programs": sorted(name for name in sys.modules if name.endswith("__main__")),
    }


if __name__ == "__main__":
    print(json.dumps(told()))
    print("to the other", file=sys.stderr)
    sys.exit(int(sys.argv[1]))
