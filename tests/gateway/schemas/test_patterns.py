from __future__ import annotations

import pytest
import regress
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.schemas import languages, patterns
from gateway.schemas.patterns import UnknownPattern

FOUND = (
    *("^a", "a$", "a|b$", "^a|b$", "(^a|b)c", "a(b$|c)", "^(?=.*[A-C])(?=.*\\d).{2,}$", "^(?!a)b*", "^(?!.*bb)[ab0]+$"),
    *("[^a]", r"\s", r"^\S+$", r"\D\W", "", "^$", "a^b", "a*^b", "a$b", "(a|^)(b|$)", r"^\w+@\w+\.b$", r"^[\w.-]+$"),
    *("^[a-]$", "^a{2,3}$", "^a{2}b{x}$", "x{", "^(?:ab){1,2}$", "a?(?!b)", "^(?<n>a)$", r"^[^\s-]{2,}$", r"^\.$"),
    *(
        r"^a\/b$",
        "(?=a)ab",
        "a(?=b)",
        "^((a|b)c?)+$",
        "^.$",
        "^(?!^[-.]*$)a?\\.?b*",
        "^(?=a$|b)",
        "(?!a)",
        "(?!a$)b?a?",
    ),
    *(
        "(?=.*b$)a",
        "^(?!.*a$)",
        "^(?=(a|^b))..$",
        "(a|(?=b))c?$",
        r"^\x61\u0062$",
        r"^\u{62}+$",
        r"[\b\cJ\0]",
        "a+?b*?",
    ),
    # The addresses of zod 4, and decimals of pydantic.
    r"^(?!\.)(?!.*\.\.)([A-Za-z0-9_'+\-\.]*)[A-Za-z0-9_+-]@([A-Za-z0-9][A-Za-z0-9\-]*\.)+[A-Za-z]{2,}$",
    r"^(?!^[-+.]*$)[+-]?0*\d*\.?\d*$",
)


@pytest.mark.parametrize("pattern", FOUND)
def test_pattern_matches_where_ecmascript_does(pattern: str) -> None:
    tree, found = patterns.found_in(pattern), regress.Regex(pattern, "u" if "\\u{" in pattern else "")

    @settings(max_examples=150, deadline=None, derandomize=True)
    @given(
        st.one_of(st.text("aabbcABx0.@- \n{}é,/'", max_size=6), st.sampled_from(("a@b.com", "a.b@c.de", "-1.5", "..")))
    )
    def compare(text: str) -> None:
        assert languages.fits(tree, text) == (found.find(text) is not None), text

    compare()


@pytest.mark.parametrize(
    ("pattern", "why"),
    [
        (r"\bx", r"'\b'"),
        (r"\p{L}", r"'\p'"),
        (r"(a)\1", r"'\1'"),
        (r"\A", r"'\A'"),
        ("(?<=a)b", "a lookbehind"),
        ("(?i)a", "'(?i'"),
        ("(?P<n>a)", "'(?P'"),
        ("(?<1>a)", "no proper name"),
        ("[]", "no characters"),
        ("[^]", "no characters"),
        ("[[:alpha:]]", "a named class"),
        ("[z-a]", "backwards"),
        ("[a", "an end that is not expected"),
        ("a**", "a repetition of a repetition"),
        ("a{2}{3}", "a repetition of a repetition"),
        ("a++", "a repetition of a repetition"),
        ("a{3,2}", "which no number is"),
        ("a{,3}", "read in different ways"),
        ("a{70000}", "repetitions"),
        ("*a", "nothing to repeat"),
        ("{1}", "nothing to repeat"),
        ("^*", "a repetition of '^'"),
        ("(^a)*", "in what is repeated"),
        ("a(?=^b)", "not at the beginning"),
        ("(?=a)^", "a lookahead before '^'"),
        ("(^|$)" * 9, "too many"),
        ("(", "a '(' without ')'"),
        (")", "a ')' without '('"),
        ("(" * 100 + ")" * 100, "parentheses in one another"),
        ("\\", "an end that is not expected"),
        (r"\x4", "no number of a character"),
        (r"\u{110000}", "which is no character"),
        (r"\ud800", "which is no character"),
        ("\ud800", "half of a surrogate pair"),
    ],
)
def test_patterns_unsupported_pattern_is_refused_with_its_reason(pattern: str, why: str) -> None:
    with pytest.raises(UnknownPattern) as refused:
        patterns.found_in(pattern)
    assert why in str(refused.value)


def test_pattern_with_a_surrogate_pair_matches_one_character() -> None:
    tree = patterns.found_in(r"^\ud83d\ude00$")
    assert languages.fits(tree, "😀")
