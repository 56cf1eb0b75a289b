"""One grammar, compiled by xgrammar. Imports no SGLang: the process that tries grammars (`sandbox`) imports this
alone."""

from __future__ import annotations

import re
from typing import Any

from gpu_scheduler.engines.sglang.base.options import one_line

MOST_STATES = "it has too many states"
_PLACE = re.compile(r"^\w+: (\[[\d:]+\] \S+:\d+: )?(Check failed: \(.*?\) is false: )?")
"""Pattern of the beginning of xgrammar's error messages: a time, and a line of its own source."""
_TOO_LARGE = "bad optional access"
"""Message that C++ gives for a grammar with more states than xgrammar counts."""


class Uncompilable(Exception):
    """A grammar cannot be compiled; `str(error)` gives the client the reason."""


def compiler(tokenizer_info: Any) -> Any:
    """xgrammar's compiler, with one thread and no cache. Its cache has no bound. An exception in one of several threads
    of its own ends the process, and a thousand properties with patterns are enough for one; an exception in its
    caller's thread is an error like others."""
    from xgrammar import GrammarCompiler

    return GrammarCompiler(tokenizer_info, cache_enabled=False, max_threads=1)


def matcher(compiler: Any, vocab_size: int, kind: str, text: str) -> tuple[Any, Any]:
    """(compiled grammar, matcher at its start). `kind` is that of `permitted_grammars`. Raises Uncompilable; a grammar
    of the kind that `sandbox` is there to find ends the process."""
    from xgrammar import GrammarMatcher, allocate_token_bitmask

    try:
        if kind == "json_schema":
            # The answer is laid out as Python's json does. With free white space a model may say nothing else to the
            # end of its context, and small ones do; a bound on it takes a hundred times the memory.
            compiled = compiler.compile_json_schema(text, any_whitespace=False)
        elif kind == "regex":
            compiled = compiler.compile_regex(text)
        elif kind == "structural_tag":
            compiled = compiler.compile_structural_tag(text)
        else:
            compiled = compiler.compile_grammar(text)
    except (RuntimeError, ValueError, TypeError) as error:
        why = _PLACE.sub("", one_line(error))[:300]
        raise Uncompilable(MOST_STATES if why == _TOO_LARGE else why) from None
    made = GrammarMatcher(compiled)
    first = allocate_token_bitmask(1, vocab_size)
    if made.fill_next_token_bitmask(first) and not first.any():
        raise Uncompilable("it allows no answer")  # {"$ref": "#"}, or a rule that is itself
    return compiled, made
