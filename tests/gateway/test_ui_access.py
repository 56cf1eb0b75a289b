"""Who may see the page."""

from __future__ import annotations

import pytest
from starlette.datastructures import Headers

from gateway.errors import Denied
from gateway.ui.access import by_setting


@pytest.mark.parametrize("http", ["127.0.0.1:8000", "localhost:8000", "[::1]:8000", "127.0.0.2:80"])
def test_ui_access_default_on_loopback_admits_loopback_host_names(http: str) -> None:
    may_see = by_setting(None, http, keys=False)
    assert may_see is not None
    for host in ("localhost", "localhost:8000", "127.0.0.1:9", "[::1]:8000", "[::1]"):
        may_see(Headers({"host": host}))
    for host in ("example.org", "localhost.example.org:8000", "10.0.0.1:8000", "127.0.0.1.example.org", ""):
        with pytest.raises(Denied):
            may_see(Headers({"host": host}))


@pytest.mark.parametrize("http", ["0.0.0.0:8000", "[::]:8000", "10.0.0.1:8000", "gateway.example.org:8000"])
def test_ui_access_default_on_other_addresses_is_off(http: str) -> None:
    assert by_setting(None, http, keys=False) is None


def test_ui_access_explicit_setting_holds_on_every_address() -> None:
    for http in ("127.0.0.1:8000", "0.0.0.0:8000"):
        assert by_setting(False, http, keys=False) is None
        everybody = by_setting(True, http, keys=False)
        assert everybody is not None
        everybody(Headers({"host": "example.org"}))
