"""Where two greedy answers part."""

import math

from benchmarks.gpu.answers import Answer, Parting, parting, partings, widest


def answer(*tokens, second=0, gap=0.5):
    """Each token before `second` by `gap`."""
    return Answer(tokens, [{token: -1.0, second: -1.0 - gap} for token in tokens])


def test_equal_answers_do_not_part_whatever_their_log_probabilities():
    assert parting(0, answer(1, 2, gap=0.5), answer(1, 2, gap=0.25)) is None


def test_they_part_at_the_first_other_token_and_the_wider_gap_counts():
    one = Answer([1, 2, 3], [{1: -1.0}, {2: -1.0, 5: -1.01}, {3: -1.0}])
    two = Answer([1, 5, 9], [{1: -1.0}, {5: -1.0, 2: -1.25}, {9: -1.0}])
    assert parting(7, one, two) == Parting(7, 1, 2, 5, 0.25)


def test_a_token_that_was_not_among_the_best_is_no_tie():
    found = parting(0, answer(1, second=4), answer(2, second=4))
    assert found is not None and found.gap == math.inf


def test_an_answer_that_ends_early_is_no_tie():
    found = parting(0, answer(1, 2), answer(1))
    assert found is not None and (found.at, found.gap) == (1, math.inf)


def test_only_answers_that_differ_are_listed_and_the_widest_counts():
    one = [answer(1, second=2, gap=0.1), answer(3), answer(5, second=6, gap=0.3)]
    two = [answer(2, second=1, gap=0.2), answer(3), answer(6, second=5, gap=0.1)]
    found = partings(one, two)
    assert [each.prompt for each in found] == [0, 2]
    assert math.isclose(widest(found), 0.3)
    assert widest([]) == 0.0
