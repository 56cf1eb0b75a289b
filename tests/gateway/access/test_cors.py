"""Pages of other origins."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import pydantic
import pytest

from gateway.access import cors
from gateway.config import GatewayConfig
from protos import common_pb2
from tests.gateway.conftest import MODEL, World
from tests.gateway.fakes import Running
from tests.gateway.openai.test_completions import events
from tests.gateway.test_app import refusal
from tests.gateway.test_keys_wire import bearer, entry

MINE, OTHER = "https://chat.example.com", "http://localhost:3000"
ALLOWED = "access-control-allow-origin"
ASKING = {"access-control-request-method": "POST", "access-control-request-headers": "authorization,content-type"}


@pytest.fixture
def settings(tmp_path: Path) -> dict[str, Any]:
    file = tmp_path / "keys.toml"
    file.write_text(entry("ann", requests_per_minute=100, tokens_per_minute=10_000) + entry("ops", admin=True))
    return {"keys_file": str(file), "cors_origins": [MINE, OTHER]}


@pytest.fixture
def key() -> str:
    return "ops"


def from_page(origin: str = MINE, key: str = "ann") -> dict[str, str]:
    return {"origin": origin, **(bearer(key) if key else {})}


def readable(answer: httpx.Response, origin: str = MINE) -> bool:
    """Whether a browser gives the answer to a page of that origin; that it never depends on cookies is checked."""
    assert "access-control-allow-credentials" not in answer.headers
    assert answer.headers.get_list(ALLOWED) in ([], [origin])
    return ALLOWED in answer.headers


@pytest.mark.parametrize("origin", [MINE, OTHER])
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/models", f"/v1/models/{MODEL}", "/tokenize", "/v1/none"])
async def test_cors_preflight_is_answered_without_a_key(world: World, path: str, origin: str) -> None:
    answer = await world.http.options(path, headers={"origin": origin, **ASKING})
    assert (answer.status_code, answer.content, readable(answer, origin)) == (204, b"", True)
    assert answer.headers["access-control-allow-headers"] == "authorization, content-type"
    assert "POST" in answer.headers["access-control-allow-methods"]
    assert answer.headers["vary"] == "origin"
    assert "content-length" not in answer.headers and "access-control-allow-private-network" not in answer.headers


async def test_cors_preflight_allows_every_well_formed_header_name(world: World) -> None:
    wanted = "x-stainless-lang,, OpenAI-Organization ,\xe9, bad name;"
    asking = {"origin": MINE, **ASKING, "access-control-request-headers": wanted.encode("latin-1")}
    asking["access-control-request-private-network"] = "true"
    answer = await world.http.options("/v1/models", headers=asking)
    assert answer.headers["access-control-allow-headers"] == "x-stainless-lang, OpenAI-Organization, bad, name"
    assert answer.headers["access-control-allow-private-network"] == "true"
    del asking["access-control-request-headers"]
    assert "access-control-allow-headers" not in (await world.http.options("/v1/models", headers=asking)).headers


@pytest.mark.parametrize(
    "origin",
    [
        "https://chat.example.com.evil.org",
        "http://chat.example.com",
        "https://chat.example.com:8443",
        "null",
        "\xe9",
        "*",
    ],
)
async def test_cors_unlisted_origin_is_refused_and_gets_no_cors_headers(world: World, origin: str) -> None:
    asking: Any = {"origin": origin.encode("latin-1"), **ASKING}
    answer = await world.http.options("/v1/models", headers=asking)
    assert "cors_origins" in str(refusal(answer, 403)["message"]) and ALLOWED not in answer.headers
    listed = await world.http.get("/v1/models", headers={"origin": origin.encode("latin-1"), **bearer("ann")})  # type: ignore[dict-item]
    assert listed.status_code == 200, "it is no access control"
    assert (ALLOWED in listed.headers, listed.headers["vary"]) == (False, "origin")


async def test_cors_options_request_that_is_no_preflight_is_handled_as_any_other(world: World) -> None:
    for headers in ({}, {"origin": MINE}, ASKING):
        refusal(await world.http.options("/v1/models", headers=headers), 401)
        refusal(await world.http.options("/v1/models", headers={**headers, **bearer("ops")}), 405)


async def test_cors_headers_are_on_every_answer_including_errors_and_streams(world: World) -> None:
    world.say("one two")
    ask = world.http.post
    answers = {
        200: await ask("/v1/chat/completions", json=world.body(), headers=from_page()),
        400: await ask("/v1/chat/completions", content=b"{", headers=from_page()),
        401: await ask("/v1/chat/completions", json=world.body(), headers=from_page(key="")),
        403: await world.http.get("/nothing", headers=from_page()),
        404: await ask("/v1/chat/completions", json=world.body(model="none"), headers=from_page()),
        405: await world.http.get("/v1/completions", headers=from_page()),
        415: await ask("/v1/completions", content=b"", headers={**from_page(), "content-encoding": "br"}),
    }
    for status, answer in answers.items():
        assert (answer.status_code, readable(answer)) == (status, True), answer.text
        exposed = answer.headers["access-control-expose-headers"].split(", ")
        assert {"x-request-id", "retry-after", "x-ratelimit-remaining-tokens"} <= set(exposed)
        assert {name for name in answer.headers if name.startswith("x-")} <= set(exposed)
        assert "origin" in answer.headers["vary"]
    for path, more in {
        "/v1/models": {},
        "/health": {"key": ""},
        "/openapi.json": {},
        "/v1/": {},
        "/v1/models/none": {},
    }.items():
        assert readable(await world.http.get(path, headers=from_page(**more))), path
    stream = await ask("/v1/chat/completions", json=world.body(stream=True), headers=from_page(OTHER))
    assert readable(stream, OTHER) and len(events(stream)) > 2
    tokens = await ask("/tokenize", json={"model": MODEL, "prompt": "a"}, headers=from_page())
    assert readable(tokens) and tokens.json()["count"]


async def test_cors_headers_are_on_internal_errors(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any) -> Any:
        raise RuntimeError("broken")

    monkeypatch.setattr("gateway.openapi.document", broken)
    monkeypatch.setattr("gateway.app.Endpoints.card", broken)
    answer = await world.http.get("/v1/models", headers=from_page())
    assert (answer.status_code, readable(answer)) == (500, True)
    monkeypatch.setattr("gateway.openai.completions.ChatForm.parse", broken)
    answer = await world.http.post("/v1/chat/completions", json=world.body(), headers=from_page())
    assert (answer.status_code, readable(answer)) == (500, True)


@pytest.mark.parametrize("path", ["/metrics", "//metrics", "/metrics/", "/metrics%0A", "/ui/", "/ui/state.json", "/ui"])
async def test_cors_system_paths_allow_no_origin(world: World, path: str) -> None:
    asked = await world.http.options(world.url + path, headers={"origin": MINE, **ASKING})
    assert asked.status_code == 401 and ALLOWED not in asked.headers
    got = await world.http.get(world.url + path, headers=from_page(key="ops"))
    assert got.status_code in (200, 302, 307) and ALLOWED not in got.headers


class TestAll:
    @pytest.fixture
    def settings(self) -> dict[str, Any]:
        return {"cors_origins": ["*"]}

    @pytest.fixture
    def key(self) -> str:
        return ""

    async def test_cors_star_allows_every_origin(self, world: World) -> None:
        async def fails(running: Running) -> None:
            running.finish(common_pb2.REJECTED, "impossible")

        asked = await world.http.options("/v1/models", headers={"origin": "null", **ASKING})
        assert (asked.status_code, asked.headers[ALLOWED]) == (204, "*")
        world.groups[0].script = fails
        for headers in ({}, {"origin": "null"}, {"origin": MINE}):
            answer = await world.http.post("/v1/chat/completions", json=world.body(), headers=headers)
            assert (answer.status_code, answer.headers[ALLOWED], "vary" in answer.headers) == (400, "*", False)
        assert ALLOWED not in (await world.http.get("/metrics", headers={"origin": MINE})).headers


class TestNone:
    @pytest.fixture
    def settings(self) -> dict[str, Any]:
        return {}

    @pytest.fixture
    def key(self) -> str:
        return ""

    async def test_cors_headers_without_the_setting_are_on_no_answer(self, world: World) -> None:
        asked = await world.http.options("/v1/models", headers={"origin": MINE, **ASKING})
        assert refusal(asked, 405)["code"] == "method_not_allowed"
        for answer in (asked, await world.http.get("/v1/models", headers={"origin": MINE})):
            assert not [name for name in answer.headers if name.startswith("access-control") or name == "vary"]


@pytest.mark.parametrize(
    "good",
    ["*", MINE, OTHER, "http://[::1]:3000", "app://obsidian.md", "chrome-extension://abc", "http://a_b", "${PAGE}",
     "https://xn--bcher-kva.example"],
)  # fmt: skip
def test_cors_origins_as_browsers_send_them_are_accepted(good: str) -> None:
    assert cors.origin(good) == good


@pytest.mark.parametrize(
    ("bad", "words"),
    [
        ("https://chat.example.com/", 'write "https://chat.example.com"'),
        ("https://chat.example.com/app?x#y", 'write "https://chat.example.com"'),
        ("HTTPS://Chat.example.com:443", 'write "https://chat.example.com"'),
        ("http://localhost:80", 'write "http://localhost"'),
        ("https://user@chat.example.com", 'write "https://chat.example.com"'),
        ("https://bücher.example", 'write "https://xn--bcher-kva.example"'),
        ("https://*.example.com", "is no origin"),
        ("chat.example.com", "is no origin"),
        ("localhost:3000", "is no origin"),
        ("//localhost", "is no origin"),
        ("null", "is no origin"),
        ("", "is no origin"),
        ("http://a b", "is no origin"),
        ("http://localhost:99999", "is no origin"),
        ("http://[::1", "is no origin"),
        (" https://chat.example.com", "chat.example.com"),
    ],
)
def test_cors_malformed_origin_is_refused_with_the_right_form(bad: str, words: str) -> None:
    with pytest.raises(ValueError) as refused:
        cors.origin(bad)
    assert words in str(refused.value) and "\n" not in str(refused.value).replace(bad, "")
    with pytest.raises(pydantic.ValidationError):
        GatewayConfig(name="g", listen="unix:/g", http="127.0.0.1:1", placement="unix:/p", cors_origins=[bad])


def test_cors_star_beside_another_origin_is_refused() -> None:
    with pytest.raises(pydantic.ValidationError, match="name no other beside it"):
        GatewayConfig(name="g", listen="unix:/g", http="127.0.0.1:1", placement="unix:/p", cors_origins=["*", MINE])
