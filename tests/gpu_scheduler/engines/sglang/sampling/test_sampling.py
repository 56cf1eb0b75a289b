"""Tokens drawn by seeds, on a CPU. That a GPU draws the same: `tests/gpu/test_drawing.py`."""

from __future__ import annotations

import pytest
import torch

from gpu_scheduler.engines.sglang.sampling.limits import SamplingLimits
from gpu_scheduler.engines.sglang.sampling.sampling import draw
from tests.gpu_scheduler.engines.sglang.drawn import ALL, limits_of, probabilities, seeds_and_places


@pytest.fixture
def chance() -> torch.Generator:
    return torch.Generator().manual_seed(1)


def allowed(probs: list[float], top_k: int, top_p: float, min_p: float) -> set[int]:
    """One row, by the rule as it is said."""
    likely = sorted(range(len(probs)), key=lambda token: (-probs[token], token))
    kept, before = set(), 0.0
    for token in likely[:top_k]:
        if before <= top_p and probs[token] >= min_p * max(probs):
            kept.add(token)
        before += probs[token]
    return kept


def test_sampled_tokens_come_as_often_as_they_are_likely() -> None:
    probs = torch.tensor([0.5, 0.3, 0.15, 0.05, 0.0])
    rows = 20_000
    drawn = draw(probs.repeat(rows, 1), torch.full((rows,), 7), torch.arange(rows), None)
    often = drawn.bincount(minlength=5) / rows
    assert (often - probs).abs().max() < 0.02
    assert often[4] == 0


def test_limited_sampling_picks_only_allowed_tokens_in_proportion_to_their_probability(chance: torch.Generator) -> None:
    for probs in probabilities(16, 300, chance):
        for limits in limits_of(16, chance):
            if limits is None:
                continue
            drawn = draw(probs, *seeds_and_places(16, chance), limits).tolist()
            min_ps = torch.zeros(16) if limits.min_ps is None else limits.min_ps
            for row, token in enumerate(drawn):
                top_k, top_p, min_p = int(limits.top_ks[row]), float(limits.top_ps[row]), float(min_ps[row])
                assert token in allowed(probs[row].tolist(), top_k, top_p + 1e-6, min_p - 1e-6)
    rows = 20_000
    probs = torch.tensor([0.1, 0.4, 0.2, 0.3]).repeat(rows, 1)
    two = SamplingLimits(torch.full((rows,), 2, dtype=torch.int32), torch.ones(rows))
    often = draw(probs, torch.full((rows,), 3), torch.arange(rows), two).bincount(minlength=4) / rows
    assert often[0] == often[2] == 0 and abs(float(often[1]) - 4 / 7) < 0.02
    half = SamplingLimits(torch.full((rows,), ALL, dtype=torch.int32), torch.ones(rows), torch.full((rows,), 0.5))
    often = draw(probs, torch.full((rows,), 3), torch.arange(rows), half).bincount(minlength=4) / rows
    assert often[0] == 0 and abs(float(often[2]) - 2 / 9) < 0.02


def test_top_k_of_one_picks_the_most_likely_token_and_of_equals_the_first(chance: torch.Generator) -> None:
    for probs in probabilities(8, 500, chance):
        one = SamplingLimits(torch.ones(8, dtype=torch.int32), torch.ones(8))
        assert draw(probs, *seeds_and_places(8, chance), one).tolist() == probs.max(dim=1).indices.tolist()


def test_seed_picks_the_same_token_whatever_other_rows_and_their_limits_are(chance: torch.Generator) -> None:
    probs = next(probabilities(9, 400, chance))
    seeds, places = seeds_and_places(9, chance)
    together = draw(probs, seeds, places, None)
    for row in range(9):
        alone = slice(row, row + 1)
        assert draw(probs[alone], seeds[alone], places[alone], None).equal(together[alone])
    beside = SamplingLimits(torch.tensor([ALL, 3, ALL, 1, 5, ALL, 2, 2, ALL], dtype=torch.int32), torch.ones(9))
    free = beside.top_ks == ALL
    assert draw(probs, seeds, places, beside)[free].equal(together[free])


def test_sampling_with_another_seed_or_at_another_place_picks_another_token(chance: torch.Generator) -> None:
    probs = torch.full((64, 5000), 1 / 5000)
    seeds, places = torch.arange(64), torch.zeros(64, dtype=torch.int64)
    assert len(set(draw(probs, seeds, places, None).tolist())) > 60
    assert len(set(draw(probs, places, seeds, None).tolist())) > 60
    assert len(set(draw(probs, seeds << 40, places, None).tolist())) > 60


def test_sampling_where_no_token_has_a_probability_picks_the_first() -> None:
    none = torch.zeros(2, 10)
    two = torch.tensor([2, ALL], dtype=torch.int32), torch.tensor([1.0, 0.5])
    for limits in (None, SamplingLimits(*two), SamplingLimits(*two, torch.tensor([0.5, 1.0]))):
        assert draw(none, torch.tensor([1, 2]), torch.tensor([3, 4]), limits).tolist() == [0, 0]
