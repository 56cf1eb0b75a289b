"""Spans of requests and of activations. A request's spans are made when it has ended, from times that were noted on its
way, so that they cost its steps nothing. Names are those of gateway/traces.py; `gen_ai.latency.*` are vLLM's."""

from __future__ import annotations

from itertools import pairwise
from math import inf, isfinite

from gpu_scheduler.residents import Resident
from protos import common_pb2
from services.telemetry import tracing
from services.telemetry.spans import UNTRACED, Span


class RequestTrace:
    """One sending of a request to this group. Times are seconds on the dispatcher's clock."""

    def __init__(self, traceparent: str, arrived_s: float, slack_s: float, waking: bool) -> None:
        self.cached_tokens = 0
        self._traceparent = traceparent
        self._arrived_s = arrived_s
        self._slack_s = slack_s
        self._waking = waking
        self._phases: list[tuple[str, float, Span]] = [("queue", arrived_s, UNTRACED)]
        self._first_token_s = 0.0
        self._why = ""

    @classmethod
    def of(cls, traceparent: str, arrived_s: float, slack_s: float, waking: bool) -> RequestTrace | None:
        """The trace of a request; None if its gateway does not trace it, or tracing is off here. `waking`: the request
        waits for a model to come up."""
        return cls(traceparent, arrived_s, slack_s, waking) if traceparent and tracing.on() else None

    def sent(self, now: float, why: str, resident: Resident) -> None:
        """The request was sent to its engine, by the rule that `why` names."""
        self._why = self._why or why
        if self._waking:  # the first time: the activation that it waited for is known now
            self._waking = False
            self._phases[0] = ("queue", self._arrived_s, resident.activation)
        self._phases.append(("prefill", now, UNTRACED))

    def first_token(self, now: float, cached_tokens: int) -> None:
        if not self._first_token_s:
            self._first_token_s, self.cached_tokens = now, cached_tokens
        self._phases.append(("decode", now, UNTRACED))

    def parked(self, now: float) -> None:
        """The request lost its memory and is back in the queue."""
        self._phases.append(("queue", now, UNTRACED))

    def end(
        self,
        now: float,
        *,
        model: str,
        finish: common_pb2.Finish,
        error: str,
        prompt_tokens: int,
        output_tokens: int,
        resumed_tokens: int,
        deadline: float,
    ) -> None:
        """The request has ended at `now`: makes and ends all its spans. `deadline`: of the first token; +inf: none."""
        span = tracing.begin("llm_request", "server", traceparent=self._traceparent, at_s=self._arrived_s)
        if not span.recorded:
            return
        spent = {"queue": 0.0, "prefill": 0.0, "decode": 0.0}
        for (name, began, link), (_, ended, _) in pairwise([*self._phases, ("", now, UNTRACED)]):
            span.child(name, at_s=began, link=link).end(ended)
            spent[name] += ended - began
        reason = common_pb2.Finish.Name(finish).lower()
        span.set(
            {
                "gen_ai.request.model": model,
                "gen_ai.response.model": model,
                "gen_ai.response.finish_reasons": [reason],
                "gen_ai.usage.input_tokens": prompt_tokens,
                "gen_ai.usage.cache_read.input_tokens": self.cached_tokens,
                "gen_ai.usage.output_tokens": output_tokens,
                "gen_ai.latency.time_in_queue": spent["queue"],
                "gen_ai.latency.time_in_model_prefill": spent["prefill"],
                "gen_ai.latency.time_in_model_decode": spent["decode"],
                "gen_ai.latency.e2e": now - self._arrived_s,
                "prism.retractions": sum(name == "queue" for name, _, _ in self._phases) - 1,
                "prism.resumed_tokens": resumed_tokens,
            }
        )
        if self._first_token_s:
            span.set({"gen_ai.latency.time_to_first_token": self._first_token_s - self._arrived_s})
        if self._why:
            span.set({"prism.start": self._why})
        if isfinite(self._slack_s):
            span.set({"prism.slack_s": self._slack_s})
        if deadline < inf:
            span.set({"prism.on_time": 0 < self._first_token_s <= deadline})
        if finish not in (common_pb2.STOP, common_pb2.LENGTH, common_pb2.ABORTED):
            span.fail(reason, error)
        span.end(now)


def activation(resident: Resident, asleep: bool, began_s: float) -> Span:
    """Begins the span of an activation, a trace of its own: many requests may wait for one activation, and their spans
    link to it."""
    span = tracing.begin("activate", at_s=began_s)
    if span.recorded:
        source = "hibernation" if asleep else "engine"
        span.set({"gen_ai.request.model": resident.spec.name, "prism.activation.source": source})
    return span


def activated(resident: Resident, now: float, error: BaseException | None = None) -> None:
    """Ends the span of an activation; its steps become child spans."""
    span = resident.activation
    if not span.recorded:
        return
    steps = [step for step in resident.steps if step[0]]
    for (name, began), (_, ended) in pairwise([*steps, ("", now)]):
        span.child(name, at_s=began).end(ended)
    span.set({"prism.weights.from": resident.weights_from})
    if error is not None:
        span.fail(type(error).__name__, str(error))
    else:
        span.set({"prism.weights.bytes": resident.measured.weights_bytes})
        copying_s = resident.step_seconds().get("copying weights", 0.0)
        if copying_s:
            span.set({"prism.weights.bytes_per_s": resident.measured.weights_bytes / copying_s})
    span.end(now)
