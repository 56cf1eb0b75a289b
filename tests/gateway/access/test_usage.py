"""Usage of a key: a line in the file for each request, and metrics."""

from __future__ import annotations

import asyncio
import json
import os
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from gateway import metrics
from gateway.access import keys
from gateway.access import usage as usage_module
from gateway.access.usage import RequestUsage, UsageLog
from testing.patience import PATIENCE_S
from tests.gateway.conftest import MODEL, World

KEY = "sk-mine"
USAGE = RequestUsage("r", MODEL, 7, 4, 3, 0, ("stop",))


@pytest.fixture
def key() -> str:
    return KEY


@pytest.fixture
def settings(tmp_path: Path) -> dict[str, Any]:
    file = tmp_path / "keys.toml"
    file.write_text(f'[[key]]\nname = "ann"\nhash = "{keys.digest(KEY)}"\n')
    file.chmod(0o600)
    return {"keys_file": str(file), "usage_file": str(tmp_path / "usage.jsonl")}


def counted(kind: str) -> float:
    return float(metrics.KEY_TOKENS.labels("ann", MODEL, kind)._value.get())


async def test_usage_of_a_request_is_a_line_of_the_file_and_counts_for_its_key(world: World, tmp_path: Path) -> None:
    before = {kind: counted(kind) for kind in ("prompt", "cached", "output")}
    ids = world.say("one two")
    answer = await world.http.post(
        "/v1/chat/completions", json=world.body(n=2), headers={**world.bearer(KEY), "x-request-id": "mine"}
    )
    refused = await world.http.post("/v1/chat/completions", json=world.body(n=0), headers=world.bearer(KEY))
    assert (answer.status_code, refused.status_code) == (200, 400)
    file = tmp_path / "usage.jsonl"
    await until(lambda: file.exists() and file.read_text().endswith("\n"))
    (line,) = file.read_text().splitlines()
    said, usage = json.loads(line), answer.json()["usage"]
    assert said.pop("time") > 1e9
    assert said == {
        "key": "ann",
        "request_id": "mine",
        "model": MODEL,
        "prompt_tokens": usage["prompt_tokens"],
        "cached_tokens": 0,
        "output_tokens": 2 * len(ids),
        "reasoning_tokens": 0,
        "finish_reasons": ["stop", "stop"],
    }
    more = {kind: counted(kind) - before[kind] for kind in before}
    assert more == {"prompt": usage["prompt_tokens"], "cached": 0, "output": usage["completion_tokens"]}


async def test_usage_file_that_is_moved_away_is_made_anew(tmp_path: Path) -> None:
    path = tmp_path / "usage.jsonl"
    await write(path)
    path.rename(tmp_path / "old")
    await write(path)
    assert len(path.read_text().splitlines()) == len((tmp_path / "old").read_text().splitlines()) == 1


async def test_usage_line_that_was_cut_spoils_no_other(tmp_path: Path) -> None:
    path = tmp_path / "usage.jsonl"
    path.write_text('{"time": 1')
    await write(path)
    cut, whole = path.read_text().splitlines()
    assert cut == '{"time": 1' and json.loads(whole)["request_id"] == "r"


async def test_usage_file_that_is_a_fifo_is_refused_and_nobody_waits_for_its_reader(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    before = lost()
    await write(tmp_path / "fifo")
    assert lost() == before + 1


async def test_usage_file_that_cannot_be_written_loses_lines_and_no_request(tmp_path: Path) -> None:
    before, log = lost(), UsageLog(str(tmp_path / "none" / "usage.jsonl"))
    log.add("", USAGE)
    await until(lambda: lost() == before + 1)
    os.mkdir(tmp_path / "none")
    log.add("", USAGE)
    await log.close()
    assert json.loads((tmp_path / "none" / "usage.jsonl").read_text())["prompt_tokens"] == 7


async def test_usage_that_a_slow_disk_does_not_take_holds_nobody_up_and_what_waits_is_written_at_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    began, goes_on, opened = threading.Event(), threading.Event(), os.open

    def slow(path: str, *rest: Any, **more: Any) -> int:
        began.set()
        assert goes_on.wait(PATIENCE_S)
        return opened(path, *rest, **more)

    monkeypatch.setattr(usage_module, "os", SimpleNamespace(**{**vars(os), "open": slow}))
    before, log = lost(), UsageLog(str(tmp_path / "usage.jsonl"), most_waiting=2)
    log.add("", USAGE)
    await until(began.is_set)
    for _ in range(4):
        log.add("", USAGE)
    assert lost() == before + 2
    goes_on.set()
    await log.close()
    assert len((tmp_path / "usage.jsonl").read_text().splitlines()) == 3


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not condition():
            await asyncio.sleep(0.005)


async def write(path: Path) -> None:
    log = UsageLog(str(path))
    log.add("", USAGE)
    await log.close()


def lost() -> float:
    return float(metrics.USAGE_LOST._value.get())
