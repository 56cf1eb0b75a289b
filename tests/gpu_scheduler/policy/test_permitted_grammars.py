import json

from gpu_scheduler.policy.permitted_grammars import MOST_CHARACTERS, MOST_LEVELS, problem


def nested(levels: int) -> str:
    return '{"items":' * levels + "{}" + "}" * levels


def test_grammar_that_may_be_compiled_has_no_problem() -> None:
    assert problem("json_schema", nested(MOST_LEVELS - 1)) == ""
    assert problem("json_schema", '{"const": "' + "[" * 1000 + '\\"{"}') == ""
    assert problem("regex", "(" * 1000 + ")" * 1000) == ""


def test_a_schema_of_too_many_levels_is_refused_whether_or_not_it_is_json() -> None:
    assert f"at most {MOST_LEVELS}" in problem("json_schema", nested(MOST_LEVELS))
    assert f"at most {MOST_LEVELS}" in problem("json_schema", '{"a":' * 10000)
    assert f"at most {MOST_LEVELS}" in problem("json_schema", '{"a' + '":[' * 10000)


def test_grammar_that_is_empty_or_too_long_is_refused() -> None:
    assert problem("ebnf", "") == "ebnf is empty"
    assert "characters" in problem("ebnf", "a" * (MOST_CHARACTERS + 1))


def test_a_schema_that_is_not_json_is_refused() -> None:
    assert "json_schema is not JSON" in problem("json_schema", '{"type": ')


def test_rules_about_numbers_of_tokens_are_refused_and_texts_that_look_like_them_are_not() -> None:
    for rule in ("Token(99999)", "ExcludeToken(1, 2)", "TokenTagDispatch((3, root))", 'root Token (1) "a"'):
        assert "numbers of tokens" in problem("ebnf", f"root ::= {rule}")
    assert problem("ebnf", 'root ::= "Token(1)" Tokens\nTokens ::= "a"') == ""
    assert problem("regex", "Token(1)") == problem("json_schema", '{"const": "Token(1)"}') == ""


def test_structural_tag_of_other_formats_or_of_a_grammar_that_is_refused_is_refused() -> None:
    def tag(format: object) -> str:
        return problem("structural_tag", json.dumps({"type": "structural_tag", "format": format}))

    reasoning = {"type": "tag", "begin": "", "content": {"type": "any_text"}, "end": "</think>"}

    def after(grammar: object) -> str:
        return tag({"type": "sequence", "elements": [{"type": "optional", "content": reasoning}, grammar]})

    assert after({"type": "grammar", "grammar": 'root ::= "a"'}) == after({"type": "regex", "pattern": "a"}) == ""
    assert "numbers of tokens" in after({"type": "grammar", "grammar": "root ::= Token(7)"})
    assert "regex is empty" in after({"type": "regex", "pattern": ""})
    for other in ("token", "any_tokens", "json_schema", "dispatch", None):
        assert f"a format {str(other)!r}" in after({"type": other})
    assert "a format 'token'" in tag({**reasoning, "begin": {"type": "token", "token": 1 << 30}})
    assert "not JSON" in problem("structural_tag", "{")
    assert "levels" in problem("structural_tag", '{"format":' * 10000)
    for wrong in ("1", "{}", '{"type": "structural_tag"}', '{"type": "x", "format": {"type": "any_text"}}'):
        assert "is an object with" in problem("structural_tag", wrong)
    assert problem("structural_tag", "") and "characters" in after({"type": "regex", "pattern": "a" * (1 << 20)})
