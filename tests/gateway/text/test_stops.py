"""Stop strings end an answer at the same character however it is cut into chunks."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.text.stops import StopMatcher

SMALL = st.text(alphabet="ab\n", max_size=30)


def _obvious(text: str, stops: list[str]) -> str:
    """Character by character: the first one that completes a stop string."""
    for end in range(len(text) + 1):
        complete = [stop for stop in stops if text[:end].endswith(stop)]
        if complete:
            return text[: end - max(map(len, complete))]
    return text


@settings(max_examples=500)
@given(
    chunks=st.lists(SMALL, max_size=10),
    stops=st.lists(st.text(alphabet="ab\n", min_size=1, max_size=4), min_size=1, max_size=4),
)
def test_stop_matcher_gives_the_same_text_however_it_is_cut(chunks: list[str], stops: list[str]) -> None:
    matcher = StopMatcher(stops)
    told = ""
    for chunk in chunks:
        text, stopped = matcher.push(chunk)
        told += text
        if stopped:
            break
    else:
        told += matcher.finish()
    assert told == _obvious("".join(chunks), stops)


def test_stop_matcher_holds_the_beginning_of_a_stop_until_it_is_none() -> None:
    matcher = StopMatcher(["STOP"])
    assert matcher.push("go ST") == ("go ", False)
    assert matcher.push("A") == ("STA", False)


def test_stop_matcher_held_text_is_released_at_the_end() -> None:
    matcher = StopMatcher(["STOP"])
    assert matcher.push("ST") == ("", False)
    assert matcher.finish() == "ST"


def test_stop_matcher_returns_nothing_of_the_stop_string() -> None:
    matcher = StopMatcher(["\n\n"])
    assert matcher.push("line\n") == ("line", False)
    assert matcher.push("\nnext") == ("", True)


def test_stop_matcher_two_stops_that_end_together_cut_the_longer_one() -> None:
    assert StopMatcher(["bc", "abc"]).push("xabc") == ("x", True)


def test_stop_matcher_first_complete_stop_ends_the_answer() -> None:
    assert StopMatcher(["abcd", "bc"]).push("abcd") == ("a", True)
