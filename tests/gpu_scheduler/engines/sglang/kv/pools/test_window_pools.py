"""The number of tokens for which the pools of layers with and without a window have addresses."""

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


def test_layers_without_a_window_have_addresses_for_many_times_the_tokens_of_layers_with_one(
    imported: Imported,
) -> None:
    imported.run(DIVIDED)
