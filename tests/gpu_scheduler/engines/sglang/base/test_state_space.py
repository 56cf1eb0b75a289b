"""The stand-in for SGLang's kernels of Mamba layers, beside a recurrence written token by token in float64."""

from __future__ import annotations

from math import exp, log1p
from types import ModuleType

import pytest
import torch

from tests.gpu_scheduler.engines.sglang.base.test_linear_attention import LENGTHS, bounds, drawn, stand_ins

HEADS, GROUPS, SIZE, STATE = 6, 2, 3, 5


@pytest.fixture(scope="module")
def operators() -> ModuleType:
    return stand_ins("state_space")


def layer(tokens: int) -> dict[str, torch.Tensor]:
    """Inputs of a layer."""
    return {
        "x": drawn(tokens, HEADS, SIZE, seed=1),
        "dt": drawn(tokens, HEADS, seed=2),
        "decay": -drawn(HEADS, seed=3).abs(),
        "b": drawn(tokens, GROUPS, STATE, seed=4),
        "c": drawn(tokens, GROUPS, STATE, seed=5),
        "d": drawn(HEADS, seed=6),
        "dt_bias": drawn(HEADS, seed=7),
    }


def recurrence(
    given: dict[str, torch.Tensor], tokens: range, head: int, state: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """(outputs, last state) of one sequence and one head: t = ln(1 + e^(dt + bias)); S = e^(t a) S + t x b'; y = S c +
    d x."""
    group, out, state = head // (HEADS // GROUPS), [], state.double()
    for token in tokens:
        step = log1p(exp(float(given["dt"][token, head] + given["dt_bias"][head])))
        x, b, c = (given["x"][token, head], given["b"][token, group], given["c"][token, group])
        state = exp(step * float(given["decay"][head])) * state + step * torch.outer(x, b).double()
        out.append(state @ c.double() + float(given["d"][head]) * x.double())
    return torch.stack(out), state


def test_scan_of_sequences_of_different_lengths_equals_the_recurrence(operators: ModuleType) -> None:
    tokens, at = sum(LENGTHS), bounds()
    given, before = layer(tokens), drawn(len(LENGTHS), HEADS, SIZE, STATE, seed=8)
    states, out = before.clone(), torch.full((tokens, HEADS, SIZE), float("nan"))
    ends = operators.state_space_scan_cpu(**given, states=states, bounds=at, out=out)
    for number in range(len(LENGTHS)):
        sequence = range(int(at[number]), int(at[number + 1]))
        for head in range(HEADS):
            said, end = recurrence(given, sequence, head, before[number, head])
            assert torch.allclose(out[list(sequence), head].double(), said, atol=1e-5)
            assert torch.allclose(ends[number, head].double(), end, atol=1e-5)
    assert torch.equal(states, before), "the states that it began with are the caller's"


def test_scan_in_two_parts_equals_that_of_the_whole(operators: ModuleType) -> None:
    tokens = LENGTHS[-1]
    given, states = layer(tokens), drawn(1, HEADS, SIZE, STATE, seed=8)
    whole, parts = (torch.empty(tokens, HEADS, SIZE) for _ in range(2))
    expected = operators.state_space_scan_cpu(**given, states=states, bounds=torch.tensor([0, tokens]), out=whole)
    for part in (slice(0, 4), slice(4, tokens)):
        now = {name: each[part] if name in ("x", "dt", "b", "c") else each for name, each in given.items()}
        length = part.stop - part.start
        states = operators.state_space_scan_cpu(**now, states=states, bounds=torch.tensor([0, length]), out=parts[part])
    assert torch.allclose(parts, whole, atol=1e-6) and torch.allclose(states, expected, atol=1e-6)
