"""A headless Chromium, driven over its DevTools protocol. Where there is none, the test that asks for it is skipped."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import itertools
import os
import shutil
import subprocess
import threading
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from services.runtime import tasks
from testing.patience import PATIENCE_S

_NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")


def executable() -> str:
    """Skips the test where there is none."""
    for name in (os.environ.get("PRISM_TEST_CHROMIUM", ""), *_NAMES):
        found = shutil.which(name) if name else None
        if found is not None:
            return found
    pytest.skip("no Chromium here (apt-get install chromium, or name one by PRISM_TEST_CHROMIUM)")


class Tab:
    """One page."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self._socket = socket
        self._numbers = itertools.count(1)
        self._answers: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._session = self._target = ""
        self.complaints: list[str] = []
        """What the page wrote to its console as an error or a warning, exceptions, refused and failed requests."""
        self.asked: list[str] = []
        """Every address that it asked for."""

    async def attach(self) -> None:
        """In a context of its own: no cookies or caches of others."""
        context = await self.send("Target.createBrowserContext", disposeOnDetach=True)
        target = await self.send("Target.createTarget", url="about:blank", **context)
        answer = await self.send("Target.attachToTarget", targetId=target["targetId"], flatten=True)
        self._target = target["targetId"]
        self._session = answer["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            await self.send(f"{domain}.enable")

    async def close(self) -> None:
        self._session = ""
        await self.send("Target.closeTarget", targetId=self._target)

    async def send(self, method: str, **parameters: Any) -> dict[str, Any]:
        number = next(self._numbers)
        answer = self._answers[number] = asyncio.get_running_loop().create_future()
        more = {"sessionId": self._session} if self._session else {}
        await self._socket.send_json({"id": number, "method": method, "params": parameters, **more})
        return await answer

    async def hear(self) -> None:
        """For ever."""
        async for message in self._socket:
            told = message.json()
            if "id" in told:
                answer = self._answers.pop(told["id"])
                if "error" in told:
                    answer.set_exception(RuntimeError(told["error"]["message"]))
                else:
                    answer.set_result(told["result"])
            else:
                self._event(told["method"], told["params"])

    def _event(self, method: str, told: dict[str, Any]) -> None:
        if method == "Runtime.exceptionThrown":
            details = told["exceptionDetails"]
            self.complaints.append(details.get("exception", {}).get("description", details["text"]))
        elif method == "Runtime.consoleAPICalled" and told["type"] in ("error", "warning", "assert"):
            self.complaints.append(" ".join(str(each.get("value", "")) for each in told["args"]))
        elif method == "Log.entryAdded" and told["entry"]["level"] in ("error", "warning"):
            self.complaints.append(f"{told['entry']['text']} {told['entry'].get('url', '')}")
        elif method == "Network.requestWillBeSent":
            self.asked.append(told["request"]["url"])

    async def open(self, url: str) -> None:
        await self.send("Page.navigate", url=url)

    async def value(self, expression: str) -> Any:
        """Of JavaScript; a promise is awaited. Raises what it throws."""
        answer = await self.send("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in answer:
            raise RuntimeError(str(answer["exceptionDetails"]))
        return answer["result"].get("value")

    async def until(self, expression: str) -> Any:
        """Its value, as soon as that is true; the page is asked again and again, also while it is loading."""
        async with asyncio.timeout(PATIENCE_S):
            while True:
                with contextlib.suppress(RuntimeError):
                    if value := await self.value(expression):
                        return value
                await asyncio.sleep(0.02)
        raise AssertionError(expression)

    async def press(self, key: str) -> None:
        """A key that has no character, "Tab" or "Escape", or Enter."""
        code, more = {"Tab": (9, {}), "Escape": (27, {}), "Enter": (13, {"text": "\r"})}[key]
        for kind in ("keyDown", "keyUp"):
            await self.send(
                "Input.dispatchKeyEvent",
                type=kind,
                key=key,
                code=key,
                windowsVirtualKeyCode=code,
                **(more if kind == "keyDown" else {}),
            )

    async def write(self, words: str) -> None:
        """Into what has the focus."""
        await self.send("Input.insertText", text=words)

    async def colours(self, scheme: str) -> None:
        """ "dark" or "light"."""
        feature = {"name": "prefers-color-scheme", "value": scheme}
        await self.send("Emulation.setEmulatedMedia", features=[feature])

    async def screenshot(self, path: Path, width: int, height: int) -> None:
        await self.send(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False
        )
        answer = await self.send("Page.captureScreenshot", format="png")
        path.write_bytes(base64.b64decode(answer["data"]))


@contextlib.contextmanager
def browser(profile: Path) -> Iterator[str]:
    """Runs one; the address of its protocol. `profile`: an empty folder."""
    command = [
        executable(),
        "--headless",
        "--no-sandbox",  # tests run as root in containers, and the page is ours
        "--disable-gpu",
        "--disable-dev-shm-usage",
        "--no-first-run",
        "--disable-background-networking",
        f"--user-data-dir={profile}",
        "--remote-debugging-port=0",
    ]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE) as process:
        assert process.stderr is not None
        try:
            while b"DevTools listening on " not in (line := process.stderr.readline()):
                assert line, "the browser ended"
            threading.Thread(target=process.stderr.read, daemon=True).start()  # or it would wait for a reader
            yield line.decode().split()[-1]
        finally:
            process.kill()


@contextlib.asynccontextmanager
async def empty_tab(address: str) -> AsyncIterator[Tab]:
    """One that knows nothing of others."""
    async with aiohttp.ClientSession() as http, http.ws_connect(address, max_msg_size=0) as socket:
        tab = Tab(socket)
        hearing = tasks.spawn(tab.hear(), "hear the browser")
        await tab.attach()
        yield tab
        await tab.close()
        await tasks.cancel(hearing)
