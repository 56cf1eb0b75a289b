"""Rounds of the benchmark of adapters, with engines that answer at once."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from safetensors import safe_open

from benchmarks.gpu import adapters, shapes
from benchmarks.gpu.fleet import Reply
from benchmarks.gpu.windows import Shape
from protos import common_pb2


class Engine:
    """Its first token comes after `first_s`, the others `step_s` apart; its clock begins at 0 for each request."""

    def __init__(self, name: str, first_s: float, step_s: float, asked: list[tuple[str, str]]) -> None:
        self.name = name
        self.measured = common_pb2.Adapter()
        self.finish = common_pb2.LENGTH
        self._times = first_s, step_s
        self._asked = asked

    def ask(
        self, prompt: Sequence[int], new_tokens: int, *, adapter: common_pb2.Adapter | None = None, **_: Any
    ) -> Reply:
        self._asked.append((self.name, adapter.name if adapter is not None else ""))
        first_s, step_s = self._times
        reply = Reply(prompt, 0.0, [5] * new_tokens, first_s=first_s, last_s=first_s + (new_tokens - 1) * step_s)
        reply.finish = self.finish
        return reply

    async def quiet(self, _timeout_s: float) -> None: ...


def made(asked: list[tuple[str, str]], *times: tuple[float, float]) -> list[Engine]:
    return [Engine(name, *each, asked) for name, each in zip(("plain", "room", "stock"), times, strict=True)]


FOUR = [common_pb2.Adapter(name=name) for name in "abcd"]


async def test_rounds_go_in_both_orders_and_ratios_are_to_the_base_without_room() -> None:
    asked: list[tuple[str, str]] = []
    engines: Any = made(asked, (0.1, 0.01), (0.2, 0.03), (0.4, 0.06))
    rounds = adapters.Rounds(adapters.cases_of(engines, FOUR), [1, 4])
    for number in range(2):
        await rounds.one(Shape(4, 3, 100), 3, number)
    half = len(asked) // 2
    assert asked[:5] == [("plain", ""), ("room", ""), ("room", "a"), ("stock", ""), ("stock", "a")]
    assert asked[half : half + 5] == asked[4::-1]
    assert asked[-4:] == [("plain", "")] * 4 and ("stock", "d") in asked[:half]
    found = {(row["batch"], row["case"], row["measure"]): row for row in rounds.summary()}
    assert len(found) == 2 * (5 + 7)
    row = found[4, "4 adapters", "decode step"]
    assert (row["seconds"], row["to_plain"]["mean"], row["rounds"]) == pytest.approx((0.03, 3.0, 2))
    row = found[1, "SGLang, one adapter", "first token"]
    assert (row["to_plain"]["mean"], row["ours_to_this"]["mean"]) == pytest.approx((4.0, 0.5))


async def test_a_round_in_which_a_request_fails_leaves_nothing() -> None:
    engines: Any = made([], (0.1, 0.01), (0.2, 0.03), (0.4, 0.06))
    rounds = adapters.Rounds(adapters.cases_of(engines, FOUR), [1])
    engines[2].finish = common_pb2.FAILED
    with pytest.raises(RuntimeError, match="SGLang"):
        await rounds.one(Shape(4, 3, 100), 3, 0)
    assert not any(rounds.seconds.values())


def test_an_adapter_of_a_shape_has_all_its_linear_layers(tmp_path: Path) -> None:
    folder = shapes.write_adapter(tmp_path, "tiny", rank=8, seed=1)
    with safe_open(folder / "adapter_model.safetensors", framework="pt") as file:
        sizes = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}
    assert len(sizes) == 3 * 7 * 2
    assert sizes["base_model.model.model.layers.2.mlp.down_proj.lora_A.weight"] == (8, 256)
    assert sizes["base_model.model.model.layers.0.self_attn.k_proj.lora_B.weight"] == (64, 8)
    config = json.loads((folder / "adapter_config.json").read_text())
    assert set(config["target_modules"]) == set(adapters._MODULES)
