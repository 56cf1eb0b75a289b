"""Grammars of answers, compiled by SGLang's xgrammar. The tokenizer is read when the first request has a grammar, since
most models never need it, and all compiling takes place in one thread, beside the steps.

Imports SGLang: only the engine process may import this.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from http import HTTPStatus
from typing import Any

from sglang.srt.constrained.base_grammar_backend import (
    BaseGrammarBackend,
    BaseGrammarObject,
    GrammarStats,
    InvalidGrammarObject,
)
from sglang.srt.constrained.xgrammar_backend import XGrammarGrammar
from sglang.srt.managers.schedule_batch import FINISH_ABORT

from gpu_scheduler.engines.sglang.base.options import one_line
from gpu_scheduler.engines.sglang.grammar import compiling
from gpu_scheduler.engines.sglang.policy.kept import BoundedCache
from gpu_scheduler.engines.sglang.policy.slow_grammars import MOST_SLOW_S, SLOW_S

Key = tuple[str, str]
"""SGLang's name for the kind of grammar, and the grammar's text."""
_KINDS = {"json": "json_schema"}
"""Kinds that have another name in the protocol than in SGLang."""
KEPT_BYTES = 64 << 20
"""Bytes of compiled grammars kept in host memory: clients never stop making new schemas."""
_LEAST_BYTES = 1 << 10
"""Bytes that every kept grammar counts as, beside its own."""


class TimedGrammar(XGrammarGrammar):  # type: ignore[misc]
    """The grammar of one request, which is given up when following it takes too much of the engine's time. Following
    nested repetitions that can be read in many ways costs more with every token, in calls that nothing can stop, and
    every request of the model waits for them."""

    def __init__(self, *grammar: Any, alone: bool) -> None:
        """`alone`: no other rank follows it too, so that it is given up at once."""
        super().__init__(*grammar)
        self._alone = alone
        self._slow_s = 0.0
        """Seconds spent in calls that were slow."""
        self.given_up = False
        """True once it is not followed any more."""

    @property
    def slow(self) -> bool:
        """Whether it has spent too much time in slow calls."""
        return self._slow_s > MOST_SLOW_S

    @contextmanager
    def _timed(self) -> Iterator[None]:
        """Context that adds the thread's CPU seconds if they are many."""
        began = time.thread_time()  # a process that is stopped is no fault of the grammar
        yield
        if (seconds := time.thread_time() - began) > SLOW_S:
            self._slow_s += seconds
            self.given_up |= self._alone and self.slow

    def accept_token(self, token: int) -> None:
        """Follows one token; does nothing once given up."""
        if not self.given_up:
            with self._timed():
                super().accept_token(token)

    def fill_vocab_mask(self, vocab_mask: Any, idx: int) -> None:
        """Writes the tokens that may come next to row `idx` of a mask; does nothing once given up."""
        if not self.given_up:
            with self._timed():
                super().fill_vocab_mask(vocab_mask, idx)

    def copy(self) -> TimedGrammar:
        """A copy for another request, at the same place of the grammar."""
        made = super().copy()
        return TimedGrammar(
            made.matcher,
            made.vocab_size,
            made.ctx,
            made.override_stop_tokens,
            made.key_string,
            made.grammar_stats,
            alone=self._alone,
        )


def end(requests: Sequence[Any], slow: Collection[str]) -> None:
    """Ends the requests whose names are in `slow` with their next step, as bad requests: trying again cannot help."""
    for request in requests:
        if request.rid in slow and not request.finished() and request.to_finish is None:
            request.grammar.given_up = True
            why = "following its grammar takes too long: it can be read in too many ways"
            request.to_finish = FINISH_ABORT(why, HTTPStatus.BAD_REQUEST, "BadRequestError")


class Grammars(BaseGrammarBackend):
    """The grammar backend, in place of SGLang's own."""

    def __init__(self, open_compiler: Callable[[], Any], vocab_size: int, alone: bool) -> None:
        """`open_compiler` makes xgrammar's compiler; it is called once, in the thread that compiles. `alone`: this is
        the only rank of its engine."""
        # One thread: a grammar that the choices of a request need at the same time is compiled once.
        self.executor = ThreadPoolExecutor(1, thread_name_prefix="grammar")
        self._open_compiler = open_compiler
        self._vocab_size = vocab_size
        self._alone = alone
        self._compiler: Any = None
        self._kept: BoundedCache[Key, BaseGrammarObject] = BoundedCache(KEPT_BYTES)
        self._last: tuple[Key, BaseGrammarObject] | None = None
        """The grammar that the thread compiled last."""

    def get_cached_or_future_value(
        self, key: Key, require_reasoning: bool
    ) -> tuple[BaseGrammarObject | Future[BaseGrammarObject], bool]:
        """(a matcher of the request's own, True), or, until it is compiled, (a future for one, False)."""
        found = self._kept.get(key)
        return (found.copy(), True) if found is not None else (self.executor.submit(self._compiled, key), False)

    def _compiled(self, key: Key) -> BaseGrammarObject:
        """A matcher for `key`, compiled in the thread. It enters the cache when SGLang says so (`set_cache`), which is
        at the same step on all ranks: a rank that knew it earlier than another would decide differently."""
        if self._last is None or self._last[0] != key:
            if self._compiler is None:
                try:
                    self._compiler = self._open_compiler()
                except Exception as error:  # the libraries raise all kinds at a broken file
                    return InvalidGrammarObject(f"the model's tokenizer cannot be used for it: {one_line(error)}")
            self._last = (key, compiled(self._compiler, self._vocab_size, key, self._alone))
        return self._last[1].copy()

    def set_cache(self, key: Key, value: BaseGrammarObject) -> None:
        """Keeps a grammar that SGLang has on all ranks. An invalid one is not kept: it may only have taken too long."""
        if not isinstance(value, InvalidGrammarObject):
            self._kept.put(key, value, _nbytes(key, value))

    def reset(self) -> None:
        """Drops all kept grammars: the model goes to sleep."""
        self._kept.clear()

    def close(self) -> None:
        """Ends the thread, without waiting for what it compiles."""
        self.executor.shutdown(wait=False, cancel_futures=True)


def compiled(compiler: Any, vocab_size: int, key: Key, alone: bool) -> BaseGrammarObject:
    """A grammar compiled by xgrammar, or an InvalidGrammarObject with the reason. SGLang's own backend would log the
    client's text."""
    kind, text = key
    try:
        context, matcher = compiling.matcher(compiler, vocab_size, _KINDS.get(kind, kind), text)
    except compiling.Uncompilable as error:
        return InvalidGrammarObject(str(error))
    return TimedGrammar(matcher, vocab_size, context, None, text, GrammarStats(dispatch_type=kind), alone=alone)


def _nbytes(key: Key, made: BaseGrammarObject) -> int:
    """Bytes that a kept grammar counts as."""
    context = getattr(made, "ctx", None)
    return _LEAST_BYTES + len(key[1]) + (int(context.memory_size_bytes) if context is not None else 0)


def open_compiler(path: str, vocab_size: int, end_ids: set[int]) -> Any:
    """xgrammar's compiler, for the tokenizer of a folder as SGLang loads it, and so the gateway. Takes a second or two.
    Raises whatever the folder makes transformers and xgrammar raise."""
    from sglang.srt.utils.hf_transformers_utils import get_tokenizer
    from xgrammar import TokenizerInfo

    tokenizer = get_tokenizer(path)
    ends = sorted(end_ids) or None
    return compiling.compiler(TokenizerInfo.from_huggingface(tokenizer, vocab_size=vocab_size, stop_token_ids=ends))


def advance(request: Any, said: list[int]) -> None:
    """Moves a request's grammar past `said`, its output from where it ran before. A grammar that does not allow that
    output ends the request."""
    if request.grammar is None or request.finished() or isinstance(request.grammar, Future):
        return
    try:
        for token in said:
            request.grammar.accept_token(token)
    except ValueError:
        request.set_finish_with_abort("the answer so far does not match its grammar")
