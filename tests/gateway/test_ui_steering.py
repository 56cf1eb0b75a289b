"""Models steered from the page, in a real browser, at a real gateway with keys before a fake placement."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from protos import common_pb2, placement_pb2
from tests.gateway.browser import Tab, browser, empty_tab
from tests.gateway.conftest import MODEL, World
from tests.gateway.test_keys_wire import entry
from tests.gateway.test_ui_page import group, shown

BUTTONS = ".actions:not([hidden]) button"
OUTCOME = "document.querySelector('.outcome').textContent"


@pytest.fixture
def settings(tmp_path: Path) -> dict[str, Any]:
    file = tmp_path / "keys.toml"
    file.write_text(entry("ops", admin=True) + entry("ann"))
    return {"keys_file": str(file)}


@pytest.fixture
def key() -> str:
    return "ops"


@pytest.fixture
async def page(world: World, tmp_path: Path) -> AsyncIterator[Tab]:
    """Open, with two groups and one model on the first."""
    world.placement.cluster.groups.extend([group("group0.sock", MODEL), group("group1.sock")])
    with browser(tmp_path / "profile") as address:
        async with empty_tab(address) as tab:
            await tab.open(world.url.replace("://", "://ops:ops@") + "/ui/")
            await tab.until("!document.getElementById('key').hidden && !!document.querySelector('#model-list > li')")
            yield tab


async def give(page: Tab, key: str) -> None:
    """Enters a key in the dialog, by keyboard alone."""
    if not await page.value("document.getElementById('key-dialog').open"):
        await page.value("document.getElementById('key').focus()")
        await page.press("Enter")
    await page.until("document.activeElement.id === 'key-field'")
    await page.write(key)
    await page.press("Enter")


async def press(page: Tab, action: str) -> None:
    await page.value(f"document.querySelector('[data-action={action}]').focus()")
    await page.press("Enter")


async def test_ui_page_steers_with_an_admin_key_and_says_what_is_refused(world: World, page: Tab) -> None:
    assert await shown(page, BUTTONS) == []
    await give(page, "nobody")
    await page.until("document.getElementById('key-fault').textContent === 'Incorrect API key provided.'")
    await give(page, "sk-…")
    await page.until("document.getElementById('key-fault').textContent.includes('of ASCII only')")
    assert await page.value("document.getElementById('key-fault').className") == "bad"
    await give(page, "ann")
    await page.until("document.getElementById('key-fault').textContent.includes(\"is not an admin's\")")
    assert await page.value("document.getElementById('key-fault').className") == ""
    assert await shown(page, BUTTONS) == []
    await give(page, "ops")
    await page.until(f"document.querySelectorAll('{BUTTONS}').length === 4")
    assert await page.value("[document.activeElement.id, sessionStorage.length, location.search]") == ["key", 1, ""]

    sleep = placement_pb2.EvictRequest(model=MODEL, target=common_pb2.HIBERNATING)
    world.placement.refusal = (grpc.StatusCode.FAILED_PRECONDITION, "it is pinned")
    await press(page, "sleep")  # it has a request
    await page.until("document.getElementById('sleep-dialog').open")
    await page.press("Escape")
    await page.until("!document.getElementById('sleep-dialog').open")
    assert world.placement.steered == []
    await press(page, "sleep")
    await page.press("Tab")
    await page.press("Enter")
    await page.until(f"{OUTCOME} === 'it is pinned'")
    assert world.placement.steered == [sleep]
    assert await page.value("document.activeElement.dataset.action") == "sleep"

    await press(page, "move")
    await page.until("document.activeElement.id === 'move-group'")
    await page.press("Tab")
    await page.press("Enter")
    await page.until(f"{OUTCOME} === 'moving…'")
    await world.publish(world.route(placement_pb2.Place(group="group1.sock", residency=common_pb2.ACTIVE)), key="ops")
    await page.until(f"{OUTCOME} === ''")
    assert world.placement.steered[1:] == [placement_pb2.MigrateRequest(model=MODEL, to_group="group1.sock")]
    assert all("ops" not in address.partition("/ui")[2] for address in page.asked)
