"""Usage of a key: a line in the file for each request, and metrics."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from gateway import metrics
from gateway.access import keys
from gateway.access.usage import RequestUsage, UsageLog
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
    (line,) = (tmp_path / "usage.jsonl").read_text().splitlines()
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


def test_usage_file_that_is_moved_away_is_made_anew(tmp_path: Path) -> None:
    path = tmp_path / "usage.jsonl"
    log = UsageLog(str(path))
    log.add("", USAGE)
    path.rename(tmp_path / "old")
    log.add("", USAGE)
    assert len(path.read_text().splitlines()) == len((tmp_path / "old").read_text().splitlines()) == 1


def test_usage_line_that_was_cut_spoils_no_other(tmp_path: Path) -> None:
    path = tmp_path / "usage.jsonl"
    path.write_text('{"time": 1')
    UsageLog(str(path)).add("", USAGE)
    cut, whole = path.read_text().splitlines()
    assert cut == '{"time": 1' and json.loads(whole)["request_id"] == "r"


def test_usage_file_that_is_a_fifo_is_refused_and_nobody_waits_for_its_reader(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    before = metrics.USAGE_LOST._value.get()
    UsageLog(str(tmp_path / "fifo")).add("", USAGE)
    assert metrics.USAGE_LOST._value.get() == before + 1


def test_usage_file_that_cannot_be_written_loses_lines_and_no_request(tmp_path: Path) -> None:
    before = metrics.USAGE_LOST._value.get()
    log = UsageLog(str(tmp_path / "none" / "usage.jsonl"))
    log.add("", USAGE)
    assert metrics.USAGE_LOST._value.get() == before + 1
    os.mkdir(tmp_path / "none")
    log.add("", USAGE)
    assert json.loads((tmp_path / "none" / "usage.jsonl").read_text())["prompt_tokens"] == 7
