"""Telling the service manager that started this process how it is: sd_notify's protocol (systemd's sd_notify(3) and
sd_watchdog_enabled(3)), without its C library.

READY=1 once it serves, WATCHDOG=1 from its event loop as long as that turns, STOPPING=1 when it ends. A process that
no manager asked to speak says nothing.
"""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import MutableMapping

from services.telemetry import log

_log = log.get(__name__)
_SEND_S = 1.0
"""A manager that does not read holds nobody up for longer."""


class Manager:
    """The service manager, as far as the environment names one. Its variables are taken out of it: children are not
    asked to speak."""

    def __init__(self, environment: MutableMapping[str, str] = os.environ) -> None:
        address = environment.pop("NOTIFY_SOCKET", "")
        interval_us = environment.pop("WATCHDOG_USEC", "")
        process = environment.pop("WATCHDOG_PID", str(os.getpid()))
        # "@" is how an abstract socket is written.
        self._address = "\0" + address[1:] if address.startswith("@") else address
        self._interval_s = 0.0
        if address and interval_us.isdigit() and process == str(os.getpid()):
            self._interval_s = int(interval_us) / 1e6
        # Open from the start: it is when descriptors are short that it matters to be heard.
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) if address else None
        if self._socket is not None:
            self._socket.settimeout(_SEND_S)

    def ready(self, status: str) -> None:
        """It serves. `status` is for a person."""
        self._say(f"READY=1\nSTATUS={_one_line(status)}")

    def stopping(self) -> None:
        """It ends: a drain may take its time."""
        self._say("STOPPING=1\nSTATUS=stopping")

    def failed(self, why: str) -> None:
        """It ends because of `why`."""
        self._say(f"STATUS={_one_line(why)}")

    async def beat(self) -> None:
        """WATCHDOG=1 twice in each interval, for as long as the loop turns; returns at once where none is awaited."""
        while self._interval_s:
            self._say("WATCHDOG=1")
            await asyncio.sleep(self._interval_s / 2)

    def _say(self, state: str) -> None:
        if self._socket is None:
            return
        try:
            self._socket.sendto(state.encode(), self._address)
        except OSError as error:
            _log.warning("service manager not told", what=state, why=error.strerror or str(error))


def _one_line(text: str) -> str:
    """A second line would be a variable of its own."""
    return " ".join(text.split())
