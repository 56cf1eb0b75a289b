"""Moving cached prefixes together: bytes, tree and accounting stay one."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from gpu_scheduler.engines.sglang import compaction
from gpu_scheduler.engines.sglang.ids import HostIds
from gpu_scheduler.engines.sglang.policy.envelopes import Envelopes
from tests.gpu_scheduler.engines.sglang.test_eviction import Node, Tree

ENVELOPE, EXTENT, COUNT = 4, 16, 200


def world(page_size: int, seed: int) -> tuple[Any, Tree, dict[int, bytes]]:
    """Nodes of a few pages each, scattered over twice the extents that they need; what each node's pages hold."""
    chance = random.Random(seed)
    envelopes = Envelopes(envelope_bytes=ENVELOPE, extent_bytes=EXTENT, count=COUNT)
    envelopes.hold(range(COUNT * ENVELOPE // EXTENT))
    taken = envelopes.take(COUNT)
    assert taken is not None
    kept = chance.sample(range(1, COUNT), COUNT // 2)
    envelopes.give(np.array(sorted(set(range(COUNT)) - set(kept)), dtype=np.int64))
    rows = torch.tensor([[chance.randrange(256) for _ in range(ENVELOPE)] for _ in range(COUNT)], dtype=torch.uint8)
    units = np.arange(envelopes.n_extents)
    kv = SimpleNamespace(envelopes=envelopes, page_size=page_size, rows=rows, ids=HostIds(), units=lambda: units)
    tree, held = Tree(), {}
    while kept:
        pages = [kept.pop() for _ in range(min(len(kept), chance.randrange(1, 5)))]
        locked = chance.random() < 0.2
        slots = [page * page_size + i for page in pages for i in range(page_size)]
        node = Node(tree.root_node, slots, used_at=1.0, locked=locked)
        held[id(node)] = (node, list(node.value), rows[pages].numpy().tobytes(), locked)
    return kv, tree, held


def begun(envelopes: Envelopes) -> int:
    return int(np.count_nonzero(envelopes.live_by_extent()))


@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("seed", range(5))
def test_prefixes_are_moved_together_and_hold_what_they_held(page_size: int, seed: int) -> None:
    kv, tree, held = world(page_size, seed)
    before = begun(kv.envelopes)
    assert compaction.is_scattered(kv)
    assert compaction.compact(tree, kv) > 0
    assert begun(kv.envelopes) < before
    kv.envelopes.audit()
    live = set()
    for node, slots, content, locked in held.values():
        pages = node.value[::page_size] // page_size
        assert torch.equal(node.value, (pages[:, None] * page_size + torch.arange(page_size)).reshape(-1))
        assert kv.rows[pages].numpy().tobytes() == content
        assert not locked or list(node.value) == slots, "a running request's pages stay where they are"
        live |= set(pages.tolist())
    assert live == set(kv.envelopes.all_live().tolist())


def test_what_is_close_together_is_left_alone() -> None:
    kv, tree, _ = world(1, 0)
    while compaction.compact(tree, kv):
        pass
    before = kv.envelopes.all_live().tolist()
    assert compaction.compact(tree, kv) == 0 and kv.envelopes.all_live().tolist() == before
