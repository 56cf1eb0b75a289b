"""The grammar of answers that call tools, of answers that either call tools or fit a schema, and of calls in answers
that are free."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import lru_cache

from gateway.errors import BadField
from gateway.schemas import grammar
from gateway.schemas.documents import SchemaRefused
from gateway.schemas.ebnf import quoted
from gateway.schemas.rules import Many, Part, Row
from gateway.tools import structural_tags, structured_outputs
from gateway.tools.formats import Format
from gateway.tools.request import Tools

_ANY = {"type": "object"}
_KNOWN = 64


def of(tools: Tools, form: Format) -> str:
    """The grammar in a format. Raises BadField for functions whose parameters cannot be kept."""
    return _made(_functions(tools), form, tools.parallel and not tools.name, tools.answer)


def of_strict_calls(tools: Tools, form: Format) -> str:
    """The structural tag of an answer in which calls are optional, and those of strict functions fit their parameters.
    The format has a mark. Raises BadField as `of` does."""
    (before, after), (before_all, after_all) = form.around, form.around_all
    rest = replace(
        form,
        around=(before.removeprefix(form.mark), after),
        around_all=(before_all.removeprefix(form.mark), after_all),
    )
    in_one = before_all.startswith(form.mark)  # one mark stands before all calls
    grammar = _made(_functions(tools, all_strict=False), rest, tools.parallel and in_one, None)
    return structural_tags.after_mark(form.mark, grammar, tools.parallel)


def _functions(tools: Tools, *, all_strict: bool = True) -> tuple[tuple[str, str, str], ...]:
    """(field, name, schema of the parameters) of each function that may be called. `all_strict`: whether the parameters
    of those count that do not say that they are strict."""
    functions = []
    for index, tool in enumerate(tools.functions):
        function = tool.function
        if function.name in tools.names:
            field = f"tools[{index}].function.parameters"
            try:
                strict = all_strict or function.strict
                text = structured_outputs.as_text(strict and function.parameters or _ANY)
            except ValueError as error:
                raise _invalid(field, error) from None
            functions.append((field, function.name, text))
    most = structured_outputs.MOST_CHARACTERS
    if (together := sum(len(text) for *_, text in functions)) > most:
        raise BadField(
            f"The tools' parameters have {together} characters, at most {most} are compiled.",
            "tools",
        )
    return tuple(functions)


@lru_cache(_KNOWN)
def _made(functions: tuple[tuple[str, str, str], ...], form: Format, several: bool, answer: str | None) -> str:
    builder = grammar.Builder()
    parameters: list[Part] = []
    for field, _, text in functions:
        try:
            parameters.append(builder.value(structured_outputs.read(text), is_object=True))
        except SchemaRefused as error:
            raise _invalid(field, error) from None
    if answer is not None:
        try:
            parameters.append(builder.value(structured_outputs.read(answer)))
        except SchemaRefused as error:
            raise _invalid("response_format", error) from None
    for index, why in builder.impossible().items():
        raise _invalid(functions[index][0] if index < len(functions) else "response_format", why)
    calls = [
        [
            quoted(f'{form.around[0]}{{"name": {json.dumps(name)}, "{form.arguments}": '),
            of_one,
            quoted("}" + form.around[1]),
        ]
        for (_, name, _), of_one in zip(functions, parameters, strict=False)
    ]
    call = builder.rules.new(calls)
    more = [Many([quoted(form.joins), call], 0, None)] if several else []
    begin, end = ([quoted(text)] if text else [] for text in form.around_all)
    ways: list[Row] = [[*begin, call, *more, *end], *([part] for part in parameters[len(functions) :])]
    try:
        return builder.rules.text(ways)
    except SchemaRefused as error:
        raise _invalid("tools", error) from None


def _invalid(field: str, why: object) -> BadField:
    return BadField(f"Invalid '{field}': {why}.", field)
