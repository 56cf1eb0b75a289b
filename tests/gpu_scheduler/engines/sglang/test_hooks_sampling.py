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
    info.need_top_p_sampling = False
    return hooks_sampling.seeds(info, None, batch)


def seeds_of(info: Any) -> list[int] | None:
    return None if info.sampling_seed is None else info.sampling_seed.tolist()


def test_a_batch_in_which_somebody_draws_carries_the_seeds_of_all() -> None:
    assert seeds_of(made(5, 2**62, greedy=False)) == [5, 2**62]
    assert seeds_of(made(5, 6, greedy=True)) is None


def test_where_a_client_named_a_seed_everybody_draws_in_the_one_way(book: Book) -> None:
    entry = book.add("a", 1)
    batch = SimpleNamespace(reqs=[SimpleNamespace(rid=entry.rid, sampling_params=SimpleNamespace(sampling_seed=5))])
    for seeded in (False, True):
        entry.seeded = seeded
        info = Info(is_all_greedy=False, sampling_seed=None, temperatures=torch.ones(1, 1), need_top_p_sampling=False)
        assert hooks_sampling.seeds(info, None, batch).need_top_p_sampling is seeded


def test_batches_are_merged_with_seeds_in_both_or_in_neither() -> None:
    for mine, other in ((True, False), (False, True)):
        first, second = made(1, 2, greedy=mine), made(3, greedy=other)
        hooks_sampling.seeds_in_both(first, second)
        assert (seeds_of(first), seeds_of(second)) == ([0, 0] if mine else [1, 2], [0] if other else [3])
    first, second = made(1, greedy=True), made(2, greedy=True)
    hooks_sampling.seeds_in_both(first, second)
    assert seeds_of(first) is None and seeds_of(second) is None


@pytest.mark.parametrize("rows", [1, 32, 33, 100])
def test_a_large_batch_is_drawn_in_parts_with_the_same_result(rows: int) -> None:
    drawn_at_once = []

    def draw(probs: torch.Tensor, seeds: torch.Tensor, flag: bool, *, positions: torch.Tensor) -> torch.Tensor:
        assert flag
        drawn_at_once.append(len(probs))
        return (probs.sum(dim=1) * 10 + seeds + positions).to(torch.int32)

    probs, seeds, positions = torch.rand(rows, 7), torch.arange(rows), torch.arange(rows) * 3
    whole = draw(probs, seeds, True, positions=positions)
    drawn_at_once.clear()
    assert hooks_sampling.draw_in_parts(draw, probs, seeds, True, positions=positions).equal(whole)
    assert max(drawn_at_once) <= 32 and sum(drawn_at_once) == rows
