"""The page in a real browser, at a real gateway before a fake placement."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator

import pytest

from protos import balloond_pb2, common_pb2, placement_pb2
from tests.gateway import fakes
from tests.gateway.browser import Tab, browser, empty_tab
from tests.gateway.conftest import MODEL, World

GIB = 1 << 30
HOSTILE = '<img src=x onerror="document.title=1">'


def device(name: str, *models: str) -> balloond_pb2.DeviceState:
    state = balloond_pb2.DeviceState(device=name, capacity_bytes=80 * GIB, booked_bytes=3 * GIB * len(models))
    for i, model in enumerate(models):
        kv = (2 + 3 * i) * GIB
        state.leases.add(
            model=model,
            weights_bytes=15 * GIB,
            kv_bytes=kv,
            kv_used_bytes=kv // 2,
            kv_cached_bytes=kv // 4,
            kv_reserve_bytes=kv // 4,
        )
        state.bookings.add(model=model, quota_bytes=3 * GIB)
        state.leased_bytes += 15 * GIB + kv
    state.free_bytes = state.capacity_bytes - state.booked_bytes - state.leased_bytes
    return state


def group(name: str, *models: str) -> placement_pb2.Group:
    told = placement_pb2.Group(group=name, reachable=True, pressure=0.5, memory=[device(name, *models)])
    for model in models:
        told.models.add(model=model, residency=common_pb2.ACTIVE, running=1, weights_bytes=15 * GIB)
    return told


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with browser(tmp_path_factory.mktemp("profile")) as address:
        yield address


@pytest.fixture
async def tab(running: str) -> AsyncIterator[Tab]:
    async with empty_tab(running) as tab:
        yield tab


@pytest.fixture
async def page(world: World, tab: Tab) -> Tab:
    """Open, with two devices and two models."""
    world.placement.cluster.groups.extend([group("cuda:0", MODEL, HOSTILE), group("cuda:1")])
    world.placement.decisions = [
        placement_pb2.Decision(model=HOSTILE, action="migrate", group="cuda:0", outcome="done in 0.50 s", took_s=0.5),
        placement_pb2.Decision(model=MODEL, action="activate", group="cuda:0", outcome="failed: no room", age_s=3),
    ]
    await tab.open(f"{world.url}/ui")
    await tab.until("document.querySelectorAll('.owner').length === 2")
    return tab


async def shown(tab: Tab, selector: str) -> list[str]:
    """The texts of what is there."""
    found = await tab.value(f"[...document.querySelectorAll({selector!r})].map((each) => each.textContent)")
    return list(found)


async def test_ui_page_loads_without_errors_and_requests_only_the_gateway(world: World, page: Tab) -> None:
    assert await page.value("document.getElementById('status').textContent") == "live"
    assert page.complaints == []
    assert page.asked and all(address.startswith(f"{world.url}/ui") for address in page.asked)


async def test_ui_page_bars_are_in_proportion_to_memory(page: Tab) -> None:
    widths = await page.value(
        "[...document.querySelectorAll('.bar')].map((bar) => [...bar.children].map((each) => each.style.width))"
    )
    assert widths == [["25%", "21.25%", "7.5%"], []]
    label = await page.value("document.querySelector('.bar').getAttribute('aria-label')")
    drawn = await page.value("document.querySelector('.history').getAttribute('aria-label')")
    assert drawn == "cuda:0: between 43 GiB and 43 GiB were held in the last two minutes"
    assert "cuda:0: 37 GiB of 80 GiB free" in label and f"{MODEL} 17 GiB" in label


async def test_ui_page_tables_have_the_numbers_of_the_drawings(page: Tab) -> None:
    await page.value("document.querySelectorAll('details').forEach((each) => (each.open = true))")
    await page.until("document.querySelectorAll('#decision-table tbody tr').length === 2")
    memory = await shown(page, ".device:first-child tbody tr:first-child > *")
    assert memory == [HOSTILE, "15 GiB", "2.5 GiB", "1.3 GiB", "1.3 GiB", "3 GiB"]
    assert await shown(page, "#queue-table tbody th") == [HOSTILE, MODEL]
    decisions = await shown(page, "#decision-table tbody tr:first-child > *")
    assert decisions[1:5] == [HOSTILE, "migrate", "cuda:0", "done in 0.50 s"]
    assert await shown(page, ".line .mark > text") == ["⇄", "✕"]


async def test_ui_page_shows_model_names_as_text_and_never_as_markup(page: Tab) -> None:
    assert await shown(page, ".owner b") == [HOSTILE, MODEL.split("/")[-1]]
    assert await page.value("[document.images.length, document.title]") == [0, "Prism"]
    with pytest.raises(RuntimeError, match="TrustedHTML"):
        await page.value("document.body.innerHTML = 'x'")


async def test_ui_page_counts_met_targets_by_model(world: World, page: Tab) -> None:
    world.say("one")
    await world.http.post(
        "/v1/completions", json={"model": MODEL, "prompt": "hello"}, headers={"x-slo-ttft-ms": "60000"}
    )
    # Counters are the process's: models of other tests may be in the table too.
    row = "[...document.querySelectorAll('#target-table tbody tr')]"
    row += f".find((row) => row.firstChild.textContent === '{MODEL}')"
    await page.until(f"{row}?.children[1].textContent === '100.0 % of 1'")
    assert await page.value(f"{row}.children[3].textContent") == "–"


async def test_ui_page_conversation_stays_where_its_reader_has_scrolled_to(world: World, page: Tab) -> None:
    words, log = "one two " * 100, "document.getElementById('chat-log')"
    await world.publish(world.route(fakes.place(world.groups[0])))
    ids = world.say(words, end=False)
    await page.until(f"document.getElementById('chat-model').value === '{MODEL}'")
    await page.value("document.getElementById('chat-message').focus()")
    await page.write("hello")
    await page.press("Enter")
    await page.value("document.getElementById('chat-form').style.setProperty('width', '12rem')")
    await page.until(f"document.querySelector('.assistant')?.textContent.length > {len(words)}")
    assert await page.value(f"{log}.scrollTop > 0 && {log}.scrollHeight - {log}.scrollTop - {log}.clientHeight < 24")
    (running,) = [running for group in world.groups for running in group.requests]
    for place in ("0", f"{log}.scrollHeight"):
        told = await page.value(f"({log}.scrollTop = {place}, document.querySelector('.assistant').textContent.length)")
        running.tokens(ids)
        await page.until(f"document.querySelector('.assistant').textContent.length > {told} + 500")
        left = await page.value(f"[{log}.scrollTop, {log}.scrollHeight - {log}.scrollTop - {log}.clientHeight]")
        assert left[0] == 0 if place == "0" else left[1] < 24


async def test_ui_page_says_of_many_models_away_how_many_there_are(world: World, page: Tab) -> None:
    await world.publish(*(world.route(name=f"{'long-' * 20}{i}") for i in range(9)))
    await page.until("document.getElementById('elsewhere').textContent === 'On no device: 9 models cold'")


async def test_ui_page_controls_are_all_reached_by_keyboard(page: Tab) -> None:
    await page.value("document.addEventListener('focusin', (event) => (window.focused ??= []).push(event.target))")
    for _ in range(22):
        await page.press("Tab")
    reached = await page.value("window.focused.map((each) => each.id || each.textContent.trim())")
    assert reached == [
        *["To the models", "Models", "Try", "Memory", "Queues", "Moves", "Targets", "filter", "pause", "model-list"],
        *["chat-model", "chat-clear", "System prompt", "chat-message", "chat-send"],
        *["Models as a table", "Models as a table", "queue-table", "span", "Placement's decisions as a table"],
        "target-table",
    ]
    await page.value("document.getElementById('pause').focus()")
    await page.press("Enter")
    assert await page.value("document.getElementById('pause').getAttribute('aria-pressed')") == "true"
    await page.value("document.querySelector('.device summary').focus()")
    await page.press("Enter")
    assert await page.value("document.querySelector('.device details').open") is True


async def test_ui_page_has_a_bar_for_a_model_that_comes_up_until_it_is_up(world: World, page: Tab) -> None:
    (model, _) = world.placement.cluster.groups[0].models
    at = common_pb2.Progress(step="copying weights", done=3 * GIB, total=12 * GIB, unit="bytes", per_s=2 * GIB)
    model.MergeFrom(placement_pb2.GroupModel(residency=common_pb2.WAKING, progress=at, waking_s=2.0))
    await page.until("document.querySelector('progress')?.value === 3 * 2 ** 30")
    (words,) = await shown(page, ".waking-on span")
    assert words == "copying weights, 3 GiB of 12 GiB, 2 GiB/s, 5 s left (cuda:0, 2 s)"
    model.progress.CopyFrom(common_pb2.Progress(step="compiling kernels", done=7, unit="kernels"))
    await page.until("document.querySelector('progress').position === -1")
    assert await shown(page, ".waking-on span") == ["compiling kernels, 7 kernels so far (cuda:0, 2 s)"]
    assert await shown(page, "#announced") == [f"{MODEL}: compiling kernels"]
    model.waking_s = 0.0
    await page.until("!document.querySelector('progress')")


async def test_ui_page_tries_a_model_and_says_how_fast_or_why_not(world: World, page: Tab) -> None:
    thinking = world.route(fakes.place(world.groups[0]))
    thinking.model.reasoning_parser = "qwen3"
    await world.publish(thinking)
    world.say("<think>they greet</think>hello there")
    await page.until(f"document.getElementById('chat-model').value === '{MODEL}'")
    await page.value("document.getElementById('chat-message').focus()")
    await page.write("hello")
    await page.press("Enter")
    await page.until("document.getElementById('chat-status').textContent === 'answered'")
    assert await shown(page, ".turn .content") == ["hello", "they greet", "hello there"]
    assert await page.value("document.querySelector('.turn details').open") is False
    (figures,) = await shown(page, ".figures")
    assert figures.startswith("first token after ") and " tokens/s, " in figures
    world.say("on and on", end=False)
    await page.write("again")
    await page.press("Enter")
    await page.until("document.getElementById('chat-status').textContent === 'answering'")
    assert await page.value("document.activeElement.id") == "chat-message"
    await page.press("Escape")
    await page.until("document.getElementById('chat-status').textContent === 'stopped'")
    assert page.complaints == []
    await world.publish(world.route(error="its weights are damaged", residency=common_pb2.ERROR))
    await page.write("and again")
    await page.press("Enter")
    await page.until("document.getElementById('chat-status').textContent.includes('its weights are damaged')")
    assert await page.value("document.getElementById('chat-message').value") == "and again"


async def test_ui_page_focus_stays_while_devices_change(world: World, page: Tab) -> None:
    await page.value("document.querySelector('.device summary').focus()")
    world.placement.cluster.groups.insert(0, group("cuda:7", "newcomer"))
    await page.until("document.querySelectorAll('.device').length === 3")
    assert await page.value("document.activeElement === document.querySelectorAll('.device summary')[1]")


async def test_ui_page_follows_the_dark_or_light_scheme_of_the_system(page: Tab) -> None:
    seen = {}
    for scheme in ("dark", "light"):
        await page.colours(scheme)
        seen[scheme] = await page.value(
            "['backgroundColor', 'color'].map((name) => getComputedStyle(document.body)[name])"
        )
    assert seen["dark"] == ["rgb(20, 20, 22)", "rgb(236, 236, 236)"]
    assert seen["light"] == ["rgb(246, 246, 244)", "rgb(28, 28, 26)"]


async def test_ui_page_shows_the_last_state_with_its_age_while_placement_is_away(world: World, page: Tab) -> None:
    await world.placement.die()
    await page.until("document.getElementById('status').dataset.state === 'away'")
    (status, age) = await shown(page, "#status, #age")
    assert status.startswith("placement is away") and age.startswith("; shown is what was told ")
    assert len(await shown(page, ".owner")) == 2
    world.placement.cluster.groups[1].CopyFrom(group("cuda:1", "third"))
    await world.placement.start()
    await page.until("document.querySelectorAll('.owner').length === 3")
    assert await shown(page, "#status") == ["live"]


async def test_ui_page_that_is_paused_shows_changes_only_once_resumed(world: World, page: Tab) -> None:
    await page.value("document.getElementById('pause').click()")
    assert await shown(page, "#status") == ["paused"]
    world.placement.cluster.groups[1].CopyFrom(group("cuda:1", "third"))
    await page.value("document.getElementById('pause').click()")
    await page.until("document.querySelectorAll('.owner').length === 3")


async def test_ui_page_shows_and_filters_a_hundred_models_on_32_devices(world: World, tab: Tab) -> None:
    names = [f"model-{i:02d}" for i in range(100)]
    world.placement.cluster.groups.extend(
        group(f"cuda:{i}", *(names[j] for j in range(100) if j % 32 == i)) for i in range(32)
    )
    await tab.open(f"{world.url}/ui/")
    await tab.until("document.querySelectorAll('.device').length === 32")
    assert len(await shown(tab, ".owner")) == len(await shown(tab, "#queue-table tbody tr")) == 100
    await tab.value("(filter.value = 'MODEL-07', filter.dispatchEvent(new Event('input')))")
    assert await shown(tab, "#queue-table tbody th") == ["model-07"]
    assert len(await shown(tab, ".owner:not(.dim)")) == 1
    assert tab.complaints == []
