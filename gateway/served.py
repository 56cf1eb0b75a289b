"""What one request is served: its choices, each an answer being made, and their end.

Each choice is read by its own consumer. The end of the request counts its answers out, settles the caller's charge and
writes the usage log's line.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from types import TracebackType

from gateway import metrics, traces
from gateway.access.access import Caller
from gateway.access.quotas import Charge
from gateway.access.usage import RequestUsage, UsageLog
from gateway.errors import Late
from gateway.parsing.parsers import Splitter
from gateway.request import AnswerJob, Request
from gateway.routing.relay import Tokens
from gateway.text.answer import Answer
from gateway.tools.formats import CallPart
from protos import common_pb2
from services.errors import PrismError
from services.telemetry.spans import Span
from tokenization.tokenizer import Tokenizer


class Choice:
    """One answer being made. One consumer awaits `next` until there is a `finish_reason`."""

    def __init__(
        self, index: int, job: AnswerJob, answer: Answer, tokens: Tokens, splitter: Splitter | None = None
    ) -> None:
        self.index = index
        self.answer = answer
        self._job = job
        self._tokens = tokens
        self._splitter = splitter
        self._reasoning: list[str] = []
        self._calls: list[CallPart] = []
        self._called = False
        self.reasoning_tokens = 0
        """Number of output tokens of the reasoning. A chunk that has the end of the reasoning and more is divided by
        characters."""
        self.first_s = self._last_s = 0.0
        self._gap = metrics.GAP.labels(job.model)
        self._counted = False

    @property
    def finish_reason(self) -> str | None:
        return self.answer.finish_reason

    @property
    def sampling(self) -> common_pb2.Sampling:
        """Sampling parameters of the answer, with the model's own for those that the client left open."""
        return self._job.sampling

    async def next(self) -> str:
        """More text of the answer, possibly none. Raises a PrismError if the answer cannot be made or not be
        finished."""
        try:
            chunk = await self._tokens.next()
        except Late:
            self._ended("late")
            raise
        except PrismError:
            self._ended("failed")
            raise
        if chunk.token_ids or chunk.embedding or (chunk.finish and not self.first_s):
            self._time()
        text = self.answer.push(chunk)
        if self._splitter is not None:
            text = await self._split(text, self._splitter)
        if self.answer.finish_reason is not None:
            self._tokens.close()
            self._ended(self.answer.finish_reason)
        return text

    async def _split(self, text: str, splitter: Splitter) -> str:
        """The text that is neither reasoning nor calls."""
        end = self.answer.finish_reason is not None
        cut = self.answer.finish_reason == "length" or self.answer.matched_stop is not None
        parts = await splitter.push(text, end, cut=end and cut)
        self._calls += parts.calls
        self._called |= bool(parts.calls)
        if parts.reasoning:
            self._reasoning.append(parts.reasoning)
            tokens = self.answer.tokens if splitter.whole else len(self.answer.latest)
            others = len(parts.text) + sum(len(part.arguments) for part in parts.calls)
            self.reasoning_tokens += round(tokens * len(parts.reasoning) / (len(parts.reasoning) + others))
        if end and self._called and self.answer.finish_reason == "stop":
            self.answer.finish_reason = "tool_calls"
        return parts.text

    def take_reasoning(self) -> str:
        """The reasoning that came since the last call of this."""
        reasoning, self._reasoning = self._reasoning, []
        return "".join(reasoning)

    def take_calls(self) -> list[CallPart]:
        """The calls of tools, or parts of them, that came since the last call of this."""
        calls, self._calls = self._calls, []
        return calls

    def close(self) -> None:
        """Ends the answer; if it is not finished, it is cancelled where it runs."""
        self._tokens.close()
        if self._splitter is not None:
            self._splitter.close()
        self._ended("cancelled")

    def _time(self) -> None:
        now = time.monotonic()
        if not self.first_s:
            self.first_s = now
            metrics.TTFT.labels(self._job.model).observe(now - self._job.arrival_s)
        else:
            self._gap.observe(now - self._last_s)
        self._last_s = now

    def _ended(self, outcome: str) -> None:
        """Counts the answer once, by how it ended first."""
        if self._counted:
            return
        self._counted = True
        model, slo = self._job.model, self._job.slo
        metrics.ANSWERS.labels(model, outcome).inc()
        metrics.OUTPUT_TOKENS.labels(model).inc(self.answer.tokens)
        if outcome == "cancelled":
            return  # its client left, or another answer of the same request failed
        served = outcome not in ("failed", "late")
        if slo.ttft_ms:
            met = served and 1000 * (self.first_s - self._job.arrival_s) <= slo.ttft_ms
            metrics.SLO.labels(model, "ttft", str(met).lower()).inc()
        if slo.tpot_ms and (self.answer.tokens > 1 or not served):
            per_token_ms = 1000 * (self._last_s - self.first_s) / max(1, self.answer.tokens - 1)
            metrics.SLO.labels(model, "tpot", str(served and per_token_ms <= slo.tpot_ms).lower()).inc()


class Served:
    """The answers to one request. Leaving its `with` block cancels those that are unfinished."""

    def __init__(
        self,
        request: Request,
        tokenizer: Tokenizer,
        prompts: Sequence[Sequence[int]],
        choices: list[Choice],
        span: Span,
        caller: Caller,
        charge: Charge,
        usage_log: UsageLog,
        ended: Callable[[], None],
    ) -> None:
        """`ended`: counts the request's answers out."""
        self._caller = caller
        self._charge = charge
        self._usage_log = usage_log
        self._count_out = ended
        self._span = span
        self.request = request
        self.tokenizer = tokenizer
        self.prompts = prompts
        self.choices = choices
        """All choices of the first prompt, then those of the next."""

    def __enter__(self) -> Served:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for choice in self.choices:
            choice.close()
        self._count_out()
        self._charge.settle(sum(map(len, self.prompts)) + self._output_tokens())
        self._usage_log.add(
            self._caller.name,
            RequestUsage(
                self.request.request_id,
                self.request.model,
                sum(map(len, self.prompts)),
                self._cached_tokens(),
                self._output_tokens(),
                self._reasoning_tokens(),
                tuple(choice.finish_reason or "cancelled" for choice in self.choices),
            ),
        )
        if self._span.recorded:
            self._tell_span()

    def _tell_span(self) -> None:
        first_s = min((choice.first_s for choice in self.choices if choice.first_s), default=0.0)
        traces.answered(
            self._span,
            self.request.model,
            prompt_tokens=sum(map(len, self.prompts)),
            cached_tokens=self._cached_tokens(),
            output_tokens=self._output_tokens(),
            finish_reasons=[choice.finish_reason or "cancelled" for choice in self.choices],
            first_token_s=first_s and first_s - self.request.arrival_s,
        )

    def _output_tokens(self) -> int:
        return sum(choice.answer.tokens for choice in self.choices)

    def _reasoning_tokens(self) -> int:
        return sum(choice.reasoning_tokens for choice in self.choices)

    def _cached_tokens(self) -> int:
        return sum(choice.answer.cached_tokens for choice in self.choices[:: self.request.choices])

    def usage(self) -> dict[str, object]:
        """OpenAI's counts: each prompt once, however many choices it has; resumed streams count as if they had not been
        interrupted."""
        prompt = sum(map(len, self.prompts))
        answers = self._output_tokens()
        return {
            "prompt_tokens": prompt,
            "completion_tokens": answers,
            "total_tokens": prompt + answers,
            "prompt_tokens_details": {"cached_tokens": self._cached_tokens()},
            "completion_tokens_details": {"reasoning_tokens": self._reasoning_tokens()},
        }
