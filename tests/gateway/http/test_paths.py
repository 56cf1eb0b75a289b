"""One way to write a path: for the router, and for who may ask."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from gateway.http import paths
from tests.gateway import fakes
from tests.gateway.conftest import MODEL, World
from tests.gateway.test_app import refusal
from tests.gateway.test_keys_wire import entry

WAYS = ("{}", "{}/", "{}//", "/{}", "//{}", "/{}//")


@given(st.text(alphabet="/aui.%\n", max_size=12))
@example("/ui/")
@example("//ui//")
@example("")
@example("*")
def test_plain_path_is_idempotent_and_has_no_extra_slashes(path: str) -> None:
    plain = paths.plain(path)
    assert paths.plain(plain) == plain
    if path.startswith("/"):
        assert [part for part in plain.split("/") if part] == [part for part in path.split("/") if part]
        assert "//" not in plain and (not plain.endswith("/") or plain in ("/", "/ui/"))


@pytest.mark.parametrize(
    ("path", "label"),
    [
        ("/v1/chat/completions", "/v1/chat/completions"),
        ("/v1/responses", "/v1/responses"),
        ("/v1/models/org/name", "/v1/models/{model}"),
        ("/ui/state.json", "/ui"),
        ("/uix", "other"),
        ("/v1/chat", "other"),
        ("/metrics\n", "other"),
    ],
)
def test_path_labels_of_metrics_are_few(path: str, label: str) -> None:
    assert paths.label(path) == label


@pytest.mark.parametrize("way", WAYS)
async def test_extra_slashes_in_a_path_change_no_answer(world: World, way: str) -> None:
    world.say("one")

    async def ask(method: str, path: str, **more: Any) -> httpx.Response:
        # Not by httpx's own joining, which would make "//" a host.
        return await world.http.request(method, world.url + way.format(path), headers={"x-request-id": "a"}, **more)

    listed = await ask("GET", "/v1/models")
    assert listed.json() == (await world.http.get("/v1/models")).json()
    assert (await ask("GET", f"/v1/models/{MODEL}")).json()["id"] == MODEL
    assert (await ask("GET", f"/v1/models/{MODEL.replace('/', '%2F')}")).json()["id"] == MODEL
    for path, body in {
        "/v1/chat/completions": world.body(),
        "/v1/completions": {"model": MODEL, "prompt": "hello"},
        "/v1/responses": {"model": MODEL, "input": "hello"},
        "/tokenize": {"model": MODEL, "prompt": "hello"},
        "/detokenize": {"model": MODEL, "tokens": [5]},
    }.items():
        answer = await ask("POST", path, json=body)
        assert (answer.status_code, answer.is_redirect) == (200, False), path
    for path in ("/health", "/metrics", "/openapi.json", "/ui/"):
        assert (await ask("GET", path)).status_code == 200, path
    assert refusal(await ask("GET", "/v1/chat/completions"), 405)["code"] == "method_not_allowed"
    assert refusal(await ask("POST", "/v1/chat"), 404)["code"] == "unknown_url"


async def test_paths_of_the_api_are_never_redirected(world: World) -> None:
    """A redirect would name http where a proxy has ended TLS, and a client would repeat a POST as a GET."""
    proxied = {"host": "llm.example.com", "x-forwarded-proto": "https"}
    for path in ("/v1/chat/completions/", "/v1/models/", "/v1/", "/nothing/"):
        for method in ("GET", "POST"):
            assert not (await world.http.request(method, path, headers=proxied)).is_redirect, path
    assert (await world.http.get("/ui")).headers["location"] == "ui/", "the page's files are named relative to it"


@pytest.mark.parametrize("name", ["org/a.b", "plain", "a/b/c", "a:b@c+d"])
async def test_model_path_is_found_by_any_name_and_escaping(world: World, name: str) -> None:
    await world.publish(world.route(fakes.place(world.groups[0]), name=name))
    for path in (name, name.replace("/", "%2F"), name.replace("/", "%2f") + "/", name.replace(":", "%3A")):
        assert (await world.http.get(f"/v1/models/{path}")).json()["id"] == name


async def asked_as_it_is(world: World, target: str, headers: str) -> int:
    """The status that a GET gets; libraries would resolve dots."""
    host, _, port = world.url.removeprefix("http://").rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(f"GET {target} HTTP/1.1\r\nhost: x\r\n{headers}connection: close\r\n\r\n".encode())
    status = int((await reader.read()).split(b" ")[1])
    writer.close()
    return status


class TestWithKeys:
    """However an admin's path is written, it is an admin's."""

    @pytest.fixture
    def settings(self, tmp_path: Path) -> dict[str, Any]:
        file = tmp_path / "keys.toml"
        file.write_text(entry("ann") + entry("ops", admin=True))
        return {"keys_file": str(file)}

    @pytest.fixture
    def key(self) -> str:
        return "ops"

    @pytest.mark.parametrize("path", ["/metrics", "/ui/", "/ui/state.json", "/ui/app.js", "/nothing"])
    async def test_protected_path_is_refused_in_every_way_to_write_it(self, world: World, path: str) -> None:
        ways = {way.format(path) for way in WAYS} | {path + "%0A", "/%2F" + path[1:], path + "%2F", path + "%2f/"}
        ways |= {f"/v1/..{path}", f"/v1/models/..{path}", f"/v1/%2e%2e{path}", f"/tokenize/..{path}", f"/v1//..{path}"}
        ways |= {
            f"/.{path}",
            f"/health/..{path}",
            f"/health//{path}",
            f"/health%2F..{path}",
            f"%2F{path[1:]}",
            path[1:],
        }
        ways |= {f"http://x{path}", f"http://x/{path}", f"{path}?/v1/models", f"{path}#/v1/models", f"*{path}"}
        for way in ways:
            for headers in ("", "authorization: Bearer ann\r\n"):
                status = await asked_as_it_is(world, way, headers)
                assert status in (400, 401, 403, 404), (way, headers)

    async def test_health_path_needs_no_key_in_any_way_to_write_it(self, world: World) -> None:
        for way in WAYS:
            assert (await world.http.get(world.url + way.format("/health"))).status_code == 200
