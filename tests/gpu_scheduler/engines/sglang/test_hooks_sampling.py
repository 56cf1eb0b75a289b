"""Seeds, on stand-ins for SGLang's batches."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from gpu_scheduler.engines.sglang import current, hooks_sampling
from gpu_scheduler.engines.sglang.book import Book


@pytest.fixture(autouse=True)
def book() -> Iterator[Book]:
    book = Book()
    current.set_instance(SimpleNamespace(book=book))  # type: ignore[arg-type]
    yield book
    current.set_instance(None)


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


def test_a_batch_in_which_somebody_draws_carries_the_seeds_of_all() -> None:
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


def test_where_nobody_draws_tokens_are_those_of_sglang() -> None:
    greedy, drawing = made(1, 2, greedy=True), made(1, 2, greedy=False)
    drawing.top_ks, drawing.top_ps = torch.tensor([1, 1], dtype=torch.int32), torch.ones(2)
    probs, places = torch.tensor([[0.2, 0.8, 0.0], [0.1, 0.4, 0.5]]), torch.tensor([4, 4])

    def original(*given: Any) -> str:
        assert given == ("sampler", probs, greedy, places, True)
        return "its own"

    assert hooks_sampling.draw(original, "sampler", probs, greedy, places, True) == "its own"
    assert hooks_sampling.draw(original, "sampler", probs, drawing, places, False).tolist() == [1, 2]
