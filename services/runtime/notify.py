"""Reports to the service manager that started this process: sd_notify's protocol (systemd's sd_notify(3) and
sd_watchdog_enabled(3)), without its C library.

READY=1 once the process serves, WATCHDOG=1 from its event loop as long as that turns, STOPPING=1 when it ends. A
process whose environment names no manager sends nothing.
"""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import MutableMapping

from services.telemetry import log

_log = log.get(__name__)
_SEND_S = 1.0
"""The most seconds that a manager which does not read may hold up a message."""


class Manager:
    """The service manager, if the environment names one. Removes its variables from the environment, since child
    processes are not to send reports."""

    def __init__(self, environment: MutableMapping[str, str] = os.environ) -> None:
        address = environment.pop("NOTIFY_SOCKET", "")
        interval_us = environment.pop("WATCHDOG_USEC", "")
        process = environment.pop("WATCHDOG_PID", str(os.getpid()))
        # An abstract socket is written with "@".
        self._address = "\0" + address[1:] if address.startswith("@") else address
        self._interval_s = 0.0
        if address and interval_us.isdigit() and process == str(os.getpid()):
            self._interval_s = int(interval_us) / 1e6
        # Opened at the start: reports matter most when descriptors are short.
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) if address else None
        if self._socket is not None:
            self._socket.settimeout(_SEND_S)

    def ready(self, status: str) -> None:
        """Reports that the process serves. `status` is for people."""
        self._say(f"READY=1\nSTATUS={_one_line(status)}")

    def stopping(self) -> None:
        """Reports that the process is ending: a drain may take its time."""
        self._say("STOPPING=1\nSTATUS=stopping")

    def failed(self, why: str) -> None:
        """Reports why the process ends."""
        self._say(f"STATUS={_one_line(why)}")

    async def beat(self) -> None:
        """Sends WATCHDOG=1 twice in each interval, for as long as the loop turns; returns at once if the manager awaits
        none."""
        while self._interval_s:
            self._say("WATCHDOG=1")
            await asyncio.sleep(self._interval_s / 2)

    def _say(self, state: str) -> None:
        if self._socket is None:
            return
        try:
            self._socket.sendto(state.encode(), self._address)
        except OSError as error:
            _log.warning("service manager cannot be reached", what=state, why=error.strerror or str(error))


def _one_line(text: str) -> str:
    """The text in one line: a second line would be a variable of its own."""
    return " ".join(text.split())
