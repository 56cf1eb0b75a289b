"""Pages of other origins in a real browser."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
from starlette.types import Receive, Scope, Send

from gateway.http import messages
from gateway.http.server import HttpServer
from testing.ports import free_port
from tests.gateway.browser import Tab, browser, empty_tab
from tests.gateway.conftest import World
from tests.gateway.test_keys_wire import entry


@pytest.fixture(scope="module")
def ports() -> tuple[int, int]:
    """Of a page that may read, and of one that may not."""
    return free_port(), free_port()


@pytest.fixture
def settings(tmp_path: Path, ports: tuple[int, int]) -> dict[str, Any]:
    file = tmp_path / "keys.toml"
    file.write_text(entry("ann") + entry("ops", admin=True))
    return {"keys_file": str(file), "cors_origins": [f"http://127.0.0.1:{ports[0]}"]}


@pytest.fixture
def key() -> str:
    return "ops"


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with browser(tmp_path_factory.mktemp("profile")) as address:
        yield address


async def a_page(scope: Scope, receive: Receive, send: Send) -> None:
    await messages.respond(send, 200, b"<title>a page</title>", kind=b"text/html")


@pytest.fixture(params=[0, 1], ids=["listed", "not listed"])
async def page(running: str, ports: tuple[int, int], request: pytest.FixtureRequest) -> AsyncIterator[tuple[Tab, bool]]:
    """A page, and whether it may read."""
    server = HttpServer(a_page, f"127.0.0.1:{ports[request.param]}")
    await server.start()
    async with empty_tab(running) as tab:
        await tab.open(f"http://127.0.0.1:{ports[request.param]}/")
        await tab.until("document.title === 'a page'")
        yield tab, request.param == 0
    await server.stop()


async def fetched(tab: Tab, url: str, **options: Any) -> list[Any] | None:
    """Status, id and text of an answer that the page can read; None: it cannot."""
    script = (
        f"fetch({json.dumps(url)}, {json.dumps(options)}).then("
        "async (answer) => [answer.status, answer.headers.get('x-request-id'), await answer.text()], () => null)"
    )
    found: list[Any] | None = await tab.value(script)
    return found


async def test_browser_page_reads_answers_if_its_origin_is_listed(world: World, page: tuple[Tab, bool]) -> None:
    tab, listed = page
    world.say("one two")
    headers = {"authorization": "Bearer ann", "content-type": "application/json", "x-stainless-lang": "js"}
    for stream in (False, True):
        body = json.dumps(world.body(stream=stream))
        answer = await fetched(tab, f"{world.url}/v1/chat/completions", method="POST", headers=headers, body=body)
        assert (answer is not None) == listed
        if answer is not None:
            assert (answer[0], bool(answer[1])) == (200, True)
            assert ("data: [DONE]" in answer[2]) == stream
    headers["authorization"] = "Bearer nobody"
    refused = await fetched(tab, f"{world.url}/v1/models", headers=headers)
    assert (refused is not None) == listed
    if refused is not None:
        assert (refused[0], json.loads(refused[2])["error"]["code"]) == (401, "invalid_api_key")
    headers["authorization"] = "Bearer ops"
    assert await fetched(tab, f"{world.url}/metrics", headers=headers) is None
    assert await fetched(tab, f"{world.url}/ui/state.json", headers=headers) is None
