"""Drawing on a GPU: the kernel beside sorting."""

from __future__ import annotations

import pytest
import torch

from gpu_scheduler.engines.sglang.sampling.sampling import by_sorting, draw
from tests.gpu_scheduler.engines.sglang.drawn import limits_of, probabilities, seeds_and_places

pytestmark = pytest.mark.gpu
ROWS = 64


@pytest.mark.parametrize("vocabulary", [1000, 8192, 32_000, 128_256])
def test_sampling_kernel_picks_the_tokens_that_sorting_picks(vocabulary: int) -> None:
    chance = torch.Generator().manual_seed(vocabulary)
    rows = others = 0
    for probs in probabilities(ROWS, vocabulary, chance):
        for limits in limits_of(ROWS, chance):
            seeds, places = seeds_and_places(ROWS, chance)
            there = None if limits is None else limits.to("cuda")
            drawn = draw(probs.cuda(), seeds.cuda(), places.cuda(), there).cpu()
            rows += ROWS
            others += int((drawn != by_sorting(probs, seeds, places, limits)).sum())
    # Sums and logarithms of 32 bits there, of 64 here: a limit, or two of the same score, in some ten thousand.
    assert rows == 36 * ROWS and others <= 1


def test_token_with_a_tiny_hash_is_sampled_where_it_is_the_only_likely_one() -> None:
    probs = torch.full((1, 50_000), 1e-12)
    probs[0, 46_653] = 1.0
    seed, place = torch.tensor([12345]), torch.tensor([266])  # its hash is 34
    assert draw(probs.cuda(), seed.cuda(), place.cuda(), None).tolist() == [46_653]
    assert draw(probs, seed, place, None).tolist() == [46_653]


def test_sampling_kernel_takes_rows_of_a_larger_tensor_and_nan_probabilities() -> None:
    chance = torch.Generator().manual_seed(5)
    wide = torch.cat([next(probabilities(ROWS, 5000, chance)), torch.ones(ROWS, 40)], dim=1)
    wide[3] = torch.nan
    seeds, places = seeds_and_places(ROWS, chance)
    drawn = draw(wide.cuda()[:, :5000], seeds.cuda(), places.cuda().int(), None).cpu()
    expected = by_sorting(wide[:, :5000], seeds, places, None)
    assert drawn[3] == 0 and drawn[4:].equal(expected[4:]) and drawn[:3].equal(expected[:3])
