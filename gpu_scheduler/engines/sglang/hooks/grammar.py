"""Hooks on SGLang's grammars: where they are compiled, and where the grammar of a resumed request begins.

Imports SGLang: only the engine process may import this.

Target in SGLang                      Why                                        Without it
------------------------------------  -----------------------------------------  ---------------------------------------
GrammarManager.__init__               Grammars are compiled by                   no request may have a grammar: SGLang
                                      `grammar/grammars.py`                      makes no backend without a tokenizer
GrammarManager                        A known grammar of a resumed request       the rest of the answer begins the
.process_req_with_grammar             moves past the output so far               grammar anew
GrammarManager                        A compiled grammar does so too; steps      the rest of the answer begins the
.get_ready_grammar_requests           wait 0.1 ms for grammars, not 5 ms         grammar anew; decode steps wait
ScheduleBatch.prepare_for_decode      Requests whose grammars take too long are  one slow grammar stops every request of
                                      ended                                      the model
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from gpu_scheduler.engines.sglang.hooks.hook import Hook
from gpu_scheduler.engines.sglang.policy.slow_grammars import slow_of
from gpu_scheduler.engines.sglang.step import current

_LOOK_S = 1e-4
"""Seconds for which a step waits for grammars while other requests decode. SGLang's own 5 ms are for an engine with
nothing else to do."""


def open_grammars(_result: Any, manager: Any, scheduler: Any) -> None:
    """Makes the grammar backend of a model. SGLang makes none without a tokenizer, and a process that takes model after
    model has none."""
    from gpu_scheduler.engines.sglang.grammar.grammars import Grammars, open_compiler

    config = scheduler.model_config
    model, vocab_size = current.model(), int(config.vocab_size)
    ends = set(config.hf_eos_token_id or ())
    open_it = partial(open_compiler, model.load.model.path, vocab_size, ends)
    manager.grammar_backend = Grammars(open_it, vocab_size, alone=model.ranks.size == 1)


def begin(result: bool, _manager: Any, request: Any) -> bool:
    """Moves a grammar that was in the cache past the output of a resumed request."""
    _advance(request)
    return result


def ready(original: Callable[[Any], list[Any]], manager: Any) -> list[Any]:
    """The requests whose grammars are compiled, each moved past the output so far."""
    interval = manager.SGLANG_GRAMMAR_POLL_INTERVAL
    if not manager.scheduler.running_batch.is_empty():
        manager.SGLANG_GRAMMAR_POLL_INTERVAL = min(interval, _LOOK_S)
    try:
        requests = original(manager)
    finally:
        manager.SGLANG_GRAMMAR_POLL_INTERVAL = interval
    for request in requests:
        _advance(request)
    return requests


def _advance(request: Any) -> None:
    """Moves the grammar of a resumed request past the output that it had at its earlier place."""
    from gpu_scheduler.engines.sglang.grammar.grammars import advance

    entry = current.model().request_table.by_rid(request.rid)
    if entry is not None and entry.resumed_tokens:
        advance(request, list(request.origin_input_ids[-entry.resumed_tokens :]))


def give_up(batch: Any) -> None:
    """Ends requests with slow grammars before a step decodes. Where an engine has several ranks, each measures its own
    times, so all go by the slow ones on which they have agreed."""
    if batch.has_grammar:
        from gpu_scheduler.engines.sglang.grammar.grammars import end

        ranks = current.model().ranks
        if slow := slow_of(batch) if ranks.size == 1 else ranks.agreed.slow:
            end(batch.reqs, slow)


_MANAGER = "sglang.srt.constrained.grammar_manager.GrammarManager"
HOOKS = [
    Hook(f"{_MANAGER}.__init__", open_grammars, "AFTER"),
    Hook(f"{_MANAGER}.process_req_with_grammar", begin, "AFTER"),
    Hook(f"{_MANAGER}.get_ready_grammar_requests", ready, "AROUND"),
    Hook("sglang.srt.managers.schedule_batch.ScheduleBatch.prepare_for_decode", give_up, "BEFORE"),
]
