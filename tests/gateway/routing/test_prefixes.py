"""Which groups have computed the beginning of a prompt."""

from __future__ import annotations

from gateway.routing.prefixes import BLOCK_TOKENS, SentPrefixes

BLOCK = list(range(BLOCK_TOKENS))


def test_longest_prefix_is_counted_in_whole_blocks_for_each_group() -> None:
    sent = SentPrefixes()
    sent.add("a", "m", [*BLOCK, *BLOCK, 1, 2])
    sent.add("b", "m", [*BLOCK, 7, *BLOCK])
    assert sent.longest(["a", "b", "c"], "m", [*BLOCK, *BLOCK, 9]) == {"a": 2 * BLOCK_TOKENS, "b": BLOCK_TOKENS, "c": 0}
    assert sent.longest(["a"], "m", BLOCK[:-1]) == {"a": 0}, "no whole block"


def test_longest_prefix_of_another_model_is_none() -> None:
    sent = SentPrefixes()
    sent.add("a", "m", BLOCK)
    assert sent.longest(["a"], "an adapter of m", BLOCK) == {"a": 0}


def test_sent_prefixes_that_were_sent_longest_ago_are_forgotten_first() -> None:
    sent = SentPrefixes(most_blocks=2)
    other, third = BLOCK[::-1], [5] * BLOCK_TOKENS
    for prompt in (BLOCK, other, BLOCK, third):
        sent.add("a", "m", prompt)
    assert [sent.longest(["a"], "m", prompt)["a"] for prompt in (BLOCK, other, third)] == [128, 0, 128]


def test_sent_prefixes_count_no_more_once_the_model_has_left_or_slept() -> None:
    sent = SentPrefixes()

    def known(*places: tuple[str, str, bool]) -> list[int]:
        sent.keep(places)
        return list(sent.longest(["a", "b"], "m", BLOCK).values())

    known(("a", "m", False), ("b", "m", True), ("b", "other", True))
    for address in "ab":
        sent.add(address, "m", BLOCK)
    assert known(("a", "m", True), ("b", "m", True)) == [128, 128], "it came up, with what was sent meanwhile"
    assert known(("a", "m", True), ("b", "m", False)) == [128, 0], "its engine died on b, or it sleeps"
    sent.add("b", "m", BLOCK)
    assert known(("a", "m", True), ("b", "m", True)) == [128, 128]
    assert known(("b", "m", True)) == [0, 128], "it left a"
    assert known(("a", "m", True), ("b", "m", True)) == [0, 128], "and came back"
