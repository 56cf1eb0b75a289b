from hypothesis import given
from hypothesis import strategies as st

from gpu_scheduler.engines.sharing.prefill_graphs import LEAST_TOKENS, MOST_TOKENS, graph_tokens

GB = 10**9


def test_prefill_graphs_of_small_models_cover_whole_chunks_and_of_large_ones_short_steps():
    sizes = {0: 512, 140 * GB: 512, 16 * GB: 512, 13 * GB: 1024, 65 * GB // 10: 2048, 5 * GB // 2: 2048, GB: 2048}
    assert {size: graph_tokens(size) for size in sizes} == sizes


@given(st.integers(0, 10**12), st.integers(1, 10**12))
def test_prefill_graphs_of_a_larger_model_are_never_larger_and_within_bounds(weights, more):
    tokens = graph_tokens(weights)
    assert LEAST_TOKENS <= tokens <= MOST_TOKENS
    assert not weights or graph_tokens(weights + more) <= tokens
