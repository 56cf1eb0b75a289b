"""Seeds, on stand-ins for SGLang's batches."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

from gpu_scheduler.engines.sglang.hooks import sampling as hooks_sampling


class Info(SimpleNamespace):
    """SGLang's, of a batch."""

    def __len__(self) -> int:
        return len(self.temperatures)


def made(*sampling_seeds: int, greedy: bool) -> Any:
    batch = SimpleNamespace(
        reqs=[SimpleNamespace(rid=f"{s}", sampling_params=SimpleNamespace(sampling_seed=s)) for s in sampling_seeds]
    )
    info = Info(is_all_greedy=greedy, sampling_seed=None, temperatures=torch.ones(len(sampling_seeds), 1))
    return hooks_sampling.seeds(info, None, batch)


def seeds_of(info: Any) -> list[int] | None:
    return None if info.sampling_seed is None else info.sampling_seed.tolist()


def test_batch_with_a_sampled_request_carries_the_seeds_of_all() -> None:
    assert seeds_of(made(5, 2**62, greedy=False)) == [5, 2**62]
    assert seeds_of(made(5, 6, greedy=True)) is None


def test_batches_are_merged_with_seeds_in_both_or_in_neither() -> None:
    for mine, other in ((True, False), (False, True)):
        first, second = made(1, 2, greedy=mine), made(3, greedy=other)
        hooks_sampling.seeds_in_both(first, second)
        assert (seeds_of(first), seeds_of(second)) == ([0, 0] if mine else [1, 2], [0] if other else [3])
    first, second = made(1, greedy=True), made(2, greedy=True)
    hooks_sampling.seeds_in_both(first, second)
    assert seeds_of(first) is None and seeds_of(second) is None


def test_tokens_are_sampled_by_seeds_within_limits_and_greedy_batches_left_to_sglang() -> None:
    greedy, drawing = made(2, 3, greedy=True), made(2, 3, greedy=False)
    greedy.need_min_p_sampling = drawing.need_min_p_sampling = False
    probs, places = torch.full((2, 1000), 0.0008), torch.tensor([4, 4])
    probs[0, 7] = probs[1, 8] = 0.2008

    def original(*given: Any) -> str:
        assert given == ("sampler", probs, greedy, places, True)
        return "its own"

    def drawn(unlimited: bool, top_ks: tuple[int, int], top_ps: tuple[float, float]) -> list[int]:
        drawing.top_ks, drawing.top_ps = torch.tensor(top_ks, dtype=torch.int32), torch.tensor(top_ps)
        tokens, choice = hooks_sampling.draw(original, "sampler", probs, drawing, places, unlimited)
        assert choice is None, "nobody asked what the tokens were drawn from"
        return tokens.tolist()  # type: ignore[no-any-return]

    assert hooks_sampling.draw(original, "sampler", probs, greedy, places, True) == "its own"
    free = drawn(True, (1, 1), (1.0, 1.0))
    assert free[0] != 7 and free[1] != 8, "seeds for which it is not the likeliest"
    assert drawn(False, (1, 1 << 30), (1.0, 1.0)) == [7, free[1]]
    assert drawn(False, (1 << 30, 1 << 30), (1.0, 0.1)) == [free[0], 8]
    drawing.need_min_p_sampling, drawing.min_ps = True, torch.tensor([0.5, 0.0])
    assert drawn(False, (1 << 30, 1 << 30), (1.0, 1.0)) == [7, free[1]]
