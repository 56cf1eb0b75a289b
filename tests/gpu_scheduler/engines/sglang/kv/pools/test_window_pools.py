"""The pools of layers with and without a window: the number of tokens for which they have addresses, and the table that
leads from one to the other."""

from __future__ import annotations

import pytest

from tests.gpu_scheduler.engines.sglang.forks import Imported

pytestmark = pytest.mark.sglang

DIVIDED = """
from hypothesis import HealthCheck, given, settings, strategies as st
from sglang.srt.model_executor.pool_configurator import HybridSWAPoolConfigurator

from gpu_scheduler.engines.sglang.hooks.memory import divided_addresses

KIB, GIB = 1 << 10, 1 << 30


def sizes(span, every, in_window, page_size):
    '''Tokens of each pool, with `span` bytes of addresses, for tokens of so many bytes in layers of each kind.'''
    configurator = object.__new__(HybridSWAPoolConfigurator)
    configurator._full_layers_num = configurator._swa_layers_num = 1
    configurator._full_per_token, configurator._swa_per_token = every, in_window
    configurator._draft_full_layers_num = configurator._draft_swa_layers_num = 0
    configurator._fused_full_entry = configurator._fused_swa_entry = None
    configurator._enable_unified_memory = False
    found = divided_addresses(HybridSWAPoolConfigurator.calculate_pool_sizes, configurator, span, page_size)
    assert found.max_total_num_tokens == found.full_max_total_num_tokens
    return found.full_max_total_num_tokens, found.swa_max_total_num_tokens


# Gemma 4 31B on a GPU has room for more than its own context of 262,144 tokens, gpt-oss as SGLang would have it.
assert sizes(192 * GIB, 80 * KIB, 800 * KIB, 16) == (1258288, 125824)
assert sizes(192 * GIB, 24 * KIB, 24 * KIB, 16) == (96 * GIB // (24 * KIB),) * 2


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.integers(2**28, 2**40), st.integers(1, 2**20), st.integers(1, 2**20), st.sampled_from((1, 16, 64)))
def test(span, every, in_window, page_size):
    tokens, tokens_in_window = sizes(span, every, in_window, page_size)
    assert tokens * every + tokens_in_window * in_window <= span
    assert tokens % page_size == tokens_in_window % page_size == 0 and tokens_in_window <= tokens
    # No kind has less than half of the addresses, unless it has a place for each token of the other one.
    assert (tokens + page_size) * every > span // 2 - every
    assert tokens_in_window == tokens or (tokens_in_window + page_size) * in_window > span // 2 - in_window


test()
"""

MOVED = """
from types import SimpleNamespace

import numpy as np
import torch

from gpu_scheduler.engines.sglang.kv.pools import window_allocator
from gpu_scheduler.engines.sglang.policy.envelopes import Envelopes

SIZE, PAGES, TOGETHER = 4, 40, 3
window_allocator._SLOTS_TOGETHER = SIZE * TOGETHER
sent = []


def send(numbers):
    sent.append(len(numbers))
    return torch.from_numpy(numbers)


every = Envelopes(envelope_bytes=8, extent_bytes=64, count=PAGES)
every.hold(range(5))
live = every.take(23)
table = torch.zeros(PAGES * SIZE + 1, dtype=torch.int64)
table[-1] = -1
peers = {int(page): 50 + int(page) for page in live[1:]}
for page, peer in peers.items():
    table[page * SIZE : (page + 1) * SIZE] = torch.arange(peer * SIZE, (peer + 1) * SIZE)
allocator = object.__new__(window_allocator.ElasticWindowAllocator)
allocator.kinds = (SimpleNamespace(ids=SimpleNamespace(send=send), envelopes=every), None)
allocator.page_size, allocator.full_to_swa_index_mapping = SIZE, table
allocator._window_moved(np.array([60, 53]), np.array([1, 7]))
new = {60: 1, 53: 7}
for page in range(PAGES):
    peer = new.get(peers.get(page, 0), peers.get(page, 0))
    assert table[page * SIZE : (page + 1) * SIZE].tolist() == [
        peer * SIZE + i if peer else 0 for i in range(SIZE)
    ], page
assert table[-1] == -1
assert max(sent) <= TOGETHER and sum(sent) == 2 * 2 + len(live), sent
"""


def test_slots_of_a_moved_window_are_rewritten_in_parts_that_a_quota_has_room_for(imported: Imported) -> None:
    imported.run(MOVED)


def test_layers_without_a_window_have_addresses_for_many_times_the_tokens_of_layers_with_one(
    imported: Imported,
) -> None:
    imported.run(DIVIDED)
