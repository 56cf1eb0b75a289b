from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.schemas import languages
from gateway.schemas.languages import EMPTY, EVERYTHING, NOTHING, LanguageWork, Tree

LETTERS = "abc"
TEXTS = ["".join(letters) for size in range(5) for letters in itertools.product(LETTERS, repeat=size)]


def _repeat(tree: Tree, least: int, more: int | None) -> Tree:
    return languages.repeat(tree, least, None if more is None else least + more)


PLAIN = st.recursive(
    st.one_of(
        st.sets(st.sampled_from(LETTERS), min_size=1).map(lambda some: languages.chars(languages.of("".join(some)))),
        st.sampled_from((EMPTY, languages.text("ab"))),
    ),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3).map(languages.row),
        st.lists(inner, max_size=3).map(languages.choice),
        st.builds(_repeat, inner, st.integers(0, 2), st.one_of(st.none(), st.integers(0, 2))),
    ),
    max_leaves=6,
)


def texts(tree: Tree) -> set[str]:
    return {text for text in TEXTS if languages.fits(tree, text)}


def brute(tree: Tree) -> set[str]:
    """Of a plain one, by what its parts are."""
    if tree.kind == "chars":
        return {one for one in LETTERS if languages.common(languages.of(one), tree.args)}
    if tree.kind == "choice":
        return {text for part in tree.args for text in brute(part)}
    if tree.kind == "row":
        found = {""}
        for part in tree.args:
            found = {one + two for one in found for two in brute(part) if len(one + two) < 5}
        return found
    part, least, most = tree.args
    found, last = set(), {""}
    for count in range(5 if most is None else min(most, 4) + 1):
        found |= last if count >= least else set()
        last = {one + two for one in last for two in brute(part) if len(one + two) < 5}
    return found


@settings(max_examples=300, deadline=None, derandomize=True)
@given(PLAIN, PLAIN, st.integers(0, 3), st.one_of(st.none(), st.integers(0, 3)))
def test_language_trees_match_exactly_the_texts_of_brute_force(
    one: Tree, other: Tree, least: int, most: int | None
) -> None:
    assert texts(one) == brute(one)
    assert texts(languages.both((one, other))) == texts(one) & texts(other)
    assert texts(languages.but(one)) == set(TEXTS) - texts(one)
    assert texts(languages.only(one, languages.of("ab"))) == {text for text in texts(one) if "c" not in text}
    short = {text for text in texts(one) if least <= len(text) and (most is None or len(text) <= most)}
    assert texts(languages.between(one, least, most)) == short
    low, high = languages.lengths(one)
    assert all(low <= len(text) and (high is None or len(text) <= high) for text in texts(one))


@settings(max_examples=200, deadline=None, derandomize=True)
@given(PLAIN, PLAIN)
def test_automaton_follows_its_texts_and_has_no_dead_states(one: Tree, other: Tree) -> None:
    tree = languages.both((one, languages.but(other)))
    states = languages.states(tree, 500, LanguageWork(100_000))
    for text in TEXTS:
        state: Tree | None = tree if tree in states else None
        for letter in text:
            ways = states[state] if state is not None else {}
            state = next(
                (rest for rest, points in ways.items() if languages.common(points, languages.of(letter))), None
            )
        assert (state is not None and state.nullable) == languages.fits(tree, text)


def test_languages_too_many_states_raise_language_too_large() -> None:
    for tree in (
        languages.repeat(languages.ANY, 0, 100),
        languages.row((EVERYTHING, languages.text("a"), languages.repeat(languages.ANY, 12, 12))),
    ):
        with pytest.raises(languages.LanguageTooLarge):
            languages.states(tree, 100, LanguageWork(100_000))
    work = LanguageWork(50)
    with pytest.raises(languages.LanguageTooLarge):
        languages.states(languages.text("abcabcabcabc"), 100, work)
    assert work.left == 0
    assert languages.states(NOTHING, 100, LanguageWork(100_000)) == {}


def test_character_ranges_are_built_subtracted_and_intersected() -> None:
    assert languages.of("cab") == ((97, 99),)
    assert languages.without(((97, 105),), ((98, 98), (100, 103))) == ((97, 97), (99, 99), (104, 105))
    assert languages.common(((97, 100),), ((99, 200),)) == ((99, 100),)
