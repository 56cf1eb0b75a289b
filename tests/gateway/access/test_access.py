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
def test_access_paths_of_models_are_open_to_any_key(access: Access, path: str) -> None:
    access.of_http(path, bearer("ann"))


@pytest.mark.parametrize(
    "path",
    ["/metrics", "/metrics\n", "/metrics/", "//metrics", "/ui", "/ui\n", "/ui/x", "/UI/", "/health\n", "/", "", "/v1"],
)
def test_access_other_paths_need_an_admin_key_however_they_are_written(access: Access, path: str) -> None:
    with pytest.raises(Denied):
        access.of_http(path, bearer("ann"))
    access.of_http(path, bearer("ops"))
    with pytest.raises(NoKey):
        access.of_http(path, Headers({}))


LATIN = base64.b64encode(b"\xff:\xff").decode()


@pytest.mark.parametrize("given", ["Basic", "Basic !", "Basic \xe9", f"Basic {LATIN}", "Bearer \xe9", "Digest ops"])
def test_access_malformed_authorization_is_treated_as_no_key(access: Access, given: str) -> None:
    with pytest.raises(NoKey):
        access.of_http("/ui/", Headers({"authorization": given}))


def test_access_without_a_key_file_every_path_is_open() -> None:
    for path in ("/metrics", "/v1/models", "/ui/"):
        assert Access(None).of_http(path, Headers({})) is ANYBODY
