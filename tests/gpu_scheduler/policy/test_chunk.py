from hypothesis import given
from hypothesis import strategies as st

from gpu_scheduler.policy.chunk import LEAST_TOKENS, MOST_TOKENS, chunk_tokens

GB = 10**9


def test_steps_of_small_models_have_more_tokens():
    sizes = {0: 2048, 16 * GB: 2048, 6 * GB: 2048, 5 * GB // 2: 4096, GB: 8192, GB // 2: 8192}
    assert {size: chunk_tokens(size, 32_768) for size in sizes} == sizes


@given(st.integers(0, 10**12), st.integers(1, 10**12), st.integers(0, 10**6))
def test_a_larger_model_never_has_more_and_none_is_out_of_bounds(weights, more, context):
    tokens = chunk_tokens(weights, context)
    assert LEAST_TOKENS <= tokens <= max(LEAST_TOKENS, min(context, MOST_TOKENS))
    assert not weights or chunk_tokens(weights + more, context) <= tokens
