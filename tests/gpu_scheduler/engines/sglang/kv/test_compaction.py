"""Moving cached prefixes together: bytes, tree and accounting stay one."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from gpu_scheduler.engines.sglang.kv import compaction
from gpu_scheduler.engines.sglang.kv.renumbering import Renumbering
from gpu_scheduler.engines.sglang.kv.slot_transfer import HostIds
from gpu_scheduler.engines.sglang.policy.envelopes import Envelopes
from tests.gpu_scheduler.engines.sglang.kv.test_prefix_eviction import Node, Tree

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
    kv = SimpleNamespace(
        envelopes=envelopes, page_size=page_size, rows=rows, ids=HostIds(), units=lambda: units, moved=lambda *_: None
    )
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
def test_compaction_moves_prefixes_together_and_keeps_their_content(page_size: int, seed: int) -> None:
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


def test_new_slots_are_sent_in_parts_that_a_quota_has_room_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compaction, "SLOTS_TOGETHER", 6)
    kv, tree, held = world(1, 0)
    monkeypatch.setattr(compaction, "_TOGETHER_BYTES", 6 * ENVELOPE)
    sent, send = [], kv.ids.send
    kv.ids.send = lambda numbers: sent.append(len(numbers)) or send(numbers)
    assert compaction.compact(tree, kv) > 6
    assert max(sent) <= 6
    for node, _, content, _ in held.values():
        assert kv.rows[node.value].numpy().tobytes() == content


def test_compaction_leaves_pages_alone_that_are_close_together() -> None:
    kv, tree, _ = world(1, 0)
    while compaction.compact(tree, kv):
        pass
    before = kv.envelopes.all_live().tolist()
    assert compaction.compact(tree, kv) == 0 and kv.envelopes.all_live().tolist() == before


@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("seed", range(5))
def test_pages_of_running_requests_move_with_every_reference_to_them(page_size: int, seed: int) -> None:
    kv, tree, held = world(page_size, seed)
    nodes = list(held.values())
    width = 5 * page_size
    table = torch.zeros((len(nodes) + 3, width), dtype=torch.int32)
    table[-1] = 7 * page_size  # of a request that has ended
    for row, (_, slots, _, _) in enumerate(nodes, start=1):
        table[row, : len(slots)] = torch.tensor(slots)
    batch = SimpleNamespace(out_cache_loc=torch.tensor([slots[-1] for _, slots, _, _ in nodes[:3]]))
    scheduler = SimpleNamespace(
        req_to_token_pool=SimpleNamespace(req_to_token=table, free_slots=[len(table) - 2, len(table) - 1]),
        running_batch=batch,
        last_batch=batch,
        result_queue=[],
    )
    stays = int(nodes[0][1][0]) // page_size
    before = begun(kv.envelopes)
    assert compaction.make_leave(scheduler, tree, kv, 8, [stays]) > 0
    assert begun(kv.envelopes) <= before - 8
    kv.envelopes.audit()
    live = set()
    for row, (node, slots, content, _) in enumerate(nodes, start=1):
        assert torch.equal(table[row, : len(slots)].long(), node.value.long())
        pages = node.value[::page_size] // page_size
        assert torch.equal(node.value, (pages[:, None] * page_size + torch.arange(page_size)).reshape(-1))
        assert kv.rows[pages].numpy().tobytes() == content
        live |= set(pages.tolist())
    assert live == set(kv.envelopes.all_live().tolist())
    assert int(nodes[0][0].value[0]) // page_size == stays
    assert batch.out_cache_loc.tolist() == [int(node.value[-1]) for node, *_ in nodes[:3]]
    assert set(table[-1].tolist()) == {7 * page_size}, "nobody's row"


@pytest.mark.parametrize("together", [3, 5, 12])
def test_table_of_requests_is_rewritten_in_parts_that_a_quota_has_room_for(
    together: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compaction, "_SLOTS_TOGETHER", together)
    rewritten, of = [], Renumbering.of
    monkeypatch.setattr(Renumbering, "of", lambda self, slots: rewritten.append(slots.numel()) or of(self, slots))
    kv, tree, held = world(1, 0)
    table = torch.zeros((len(held) + 1, 5), dtype=torch.int32)
    for row, (_, slots, _, _) in enumerate(held.values(), start=1):
        table[row, : len(slots)] = torch.tensor(slots)
    nobody = SimpleNamespace(out_cache_loc=None)
    scheduler = SimpleNamespace(
        req_to_token_pool=SimpleNamespace(req_to_token=table, free_slots=[]),
        running_batch=nobody,
        last_batch=None,
        result_queue=[],
    )
    assert compaction.make_leave(scheduler, tree, kv, 8, []) > 0
    for row, (node, slots, _, _) in enumerate(held.values(), start=1):
        assert table[row, : len(slots)].tolist() == node.value.tolist()
    assert 0 < max(rewritten) <= together and sum(rewritten) == 5 * len(held)


def test_compaction_vacates_only_extents_whose_pages_find_a_place() -> None:
    kv, tree, held = world(1, 0)
    table = torch.zeros((len(held) + 1, 5), dtype=torch.int32)
    for row, (_, slots, _, _) in enumerate(held.values(), start=1):
        table[row, : len(slots)] = torch.tensor(slots)
    nobody = SimpleNamespace(out_cache_loc=None)
    scheduler = SimpleNamespace(
        req_to_token_pool=SimpleNamespace(req_to_token=table, free_slots=[]),
        running_batch=nobody,
        last_batch=None,
        result_queue=[],
    )
    extents = kv.envelopes.n_extents
    compaction.make_leave(scheduler, tree, kv, extents, [])
    least = -(-kv.envelopes.live * ENVELOPE // EXTENT)
    assert begun(kv.envelopes) == least
    assert compaction.make_leave(scheduler, tree, kv, 1, []) == 0
