"""Who may ask for what, by the path."""

from __future__ import annotations

import base64
from types import SimpleNamespace
from typing import Any

import pytest
from starlette.datastructures import Headers

from gateway.access.access import ANYBODY, Access
from gateway.access.keys import Key, Keys, digest
from gateway.errors import Denied, NoKey


@pytest.fixture
def access() -> Access:
    known = Keys([Key(name="ann", hash=digest("ann")), Key(name="ops", hash=digest("ops"), admin=True)])
    followed: Any = SimpleNamespace(value=known)
    return Access(followed)


def bearer(secret: str) -> Headers:
    return Headers({"authorization": f"Bearer {secret}"})


@pytest.mark.parametrize("path", ["/v1/models", "/v1/chat/completions", "/v1/none", "/tokenize", "/detokenize"])
def test_what_is_about_models_is_any_keys(access: Access, path: str) -> None:
    access.of_http(path, bearer("ann"))


@pytest.mark.parametrize(
    "path",
    ["/metrics", "/metrics\n", "/metrics/", "//metrics", "/ui", "/ui\n", "/ui/x", "/UI/", "/health\n", "/", "", "/v1"],
)
def test_all_else_is_an_admins_however_it_is_written(access: Access, path: str) -> None:
    with pytest.raises(Denied):
        access.of_http(path, bearer("ann"))
    access.of_http(path, bearer("ops"))
    with pytest.raises(NoKey):
        access.of_http(path, Headers({}))


LATIN = base64.b64encode(b"\xff:\xff").decode()


@pytest.mark.parametrize("given", ["Basic", "Basic !", "Basic \xe9", f"Basic {LATIN}", "Bearer \xe9", "Digest ops"])
def test_what_is_no_key_is_none_and_no_fault(access: Access, given: str) -> None:
    with pytest.raises(NoKey):
        access.of_http("/ui/", Headers({"authorization": given}))


def test_without_a_file_of_keys_all_is_everybodys() -> None:
    for path in ("/metrics", "/v1/models", "/ui/"):
        assert Access(None).of_http(path, Headers({})) is ANYBODY
