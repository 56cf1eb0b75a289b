from math import sqrt

from hypothesis import given
from hypothesis import strategies as st

from gpu_scheduler.engines.echo.rule import embedding, next_token

contexts = st.lists(st.integers(0, 100), min_size=1, max_size=40)


def continued(context, count):
    context = list(context)
    for _ in range(count):
        context.append(next_token(context))
    return context


@given(contexts, st.integers(0, 20), st.integers(0, 20))
def test_a_stream_taken_up_again_goes_on_with_the_same_tokens(prompt, before, after):
    assert continued(continued(prompt, before), after) == continued(prompt, before + after)


def test_an_embedding_tells_tokens_and_their_order_apart():
    assert embedding([1, 5, 2], 4) == [0, 3 / sqrt(18), 3 / sqrt(18), 0]
    assert embedding([2, 1], 4) != embedding([1, 2], 4)
