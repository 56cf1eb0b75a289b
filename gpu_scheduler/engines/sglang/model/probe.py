"""The engine's own requests after a load: they prove that the model produces text or embeddings, and measure it.

They go through SGLang like any other, one stage after the other: a short one so that lazy initialisation is not
measured, then the one that is measured. On a GPU that one is a whole chunk, so that the process has taken all that it
will ever take of the device when its memory is measured; and others follow that continue where it ended, one alone and
a few together, like requests with all but a few tokens cached. Kernels that are launched for the first time are loaded,
or compiled, here: that takes half a second, for which no client's token should wait.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from protos import common_pb2, engine_pb2

_FIRST_PROMPT = 5
"""Tokens of the first prompt, so few that no graph covers them."""
PROMPT_TOKENS = 128
"""Tokens of the measured prompt on a CPU."""
_NEW_TOKENS = 6
"""Output tokens of each request."""
_MEASURED = 1
"""Index of the stage that is measured."""


@dataclass
class ProbeTrace:
    """The model's output and its speed."""

    token_ids: list[int] = field(default_factory=list)
    values: list[float] = field(default_factory=list)
    """Log-probabilities of the tokens, or the components of embeddings."""
    prefill_tokens: int = 0
    """Prompt tokens of the step that `prefill_tokens_per_s` was measured with."""
    prefill_tokens_per_s: float = 0.0
    decode_step_ms: float = 0.0
    """Milliseconds of a decode step of one request."""


class Probe:
    """The stages of the probe, which runs until `finished`; `next_requests` returns each stage in turn."""

    def __init__(
        self,
        vocab_size: int,
        context_tokens: int,
        prompt_tokens: int = PROMPT_TOKENS,
        together: int = 0,
        embeds: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`prompt_tokens`: tokens of the measured prompt. `together`: requests that continue at once where it ended,
        after one that does so alone; 0: none do."""
        self.trace = ProbeTrace()
        self.finished = False
        self.problem = ""
        """Reason why it did not run to its end; empty: it did, or still runs."""
        self._embeds = embeds
        self._clock = clock
        self._vocab_size = vocab_size
        # Prompts that continue the measured one have to fit as well: cut at the beginning they would continue nothing.
        left = context_tokens - _NEW_TOKENS - (1 + together if together else 0)
        first, counts = (
            self._prompt(number, max(1, min(tokens, left)))
            for number, tokens in enumerate((_FIRST_PROMPT, prompt_tokens))
        )
        self._stages = [[first], [counts]]
        for number, few in enumerate((1, together) if together else (), start=2):
            self._stages.append([[*counts, *self._prompt(number * few + each, 2 + each)] for each in range(few)])
        self._stage = -1
        self._open = 0
        self._times: list[float] = []

    def _prompt(self, number: int, tokens: int) -> list[int]:
        """Tokens of a prompt, other ones for every number, so that no prompt has a prefix in common with another."""
        return [(7919 * (i + 1) + 31 * number) % self._vocab_size for i in range(tokens)]

    def has(self, rid: str) -> bool:
        """Whether the request is one of the stage that runs."""
        return rid.startswith(f"0:probe-{self._stage}.")

    @property
    def proves(self) -> bool:
        """Whether the stage that runs decides if the model works. Later stages only measure, and load kernels."""
        return not self.finished and self._stage <= _MEASURED

    def next_requests(self) -> list[engine_pb2.Generate]:
        """Requests of the next stage, if the one before has ended; else none."""
        if self._open or self.finished:
            return []
        self._stage += 1
        prompts = self._stages[self._stage]
        self._open = len(prompts)
        self._times = [self._clock()]
        sampling = common_pb2.Sampling(max_new_tokens=_NEW_TOKENS, ignore_eos=True, logprobs=True)
        return [
            engine_pb2.Generate(
                request_id=f"0:probe-{self._stage}.{number}", token_ids=prompt, sampling=sampling, embed=self._embeds
            )
            for number, prompt in enumerate(prompts)
        ]

    def stop(self, problem: str) -> None:
        """Ends the probe, which cannot go on; that is a problem only while it `proves`."""
        if self.proves:
            self.problem = problem
        self.finished = True

    def heard(self, token_ids: list[int], values: list[float], ended: bool) -> None:
        """Takes tokens of a request of the running stage with their log-probabilities, or its embedding."""
        self._times.append(self._clock())
        self.trace.token_ids += token_ids
        self.trace.values += values
        if not ended:
            return
        self._open -= 1
        if self._open:
            return
        if self._stage == _MEASURED:
            steps = [later - earlier for earlier, later in zip(self._times, self._times[1:], strict=False)]
            self.trace.prefill_tokens = len(self._stages[_MEASURED][0])
            self.trace.prefill_tokens_per_s = self.trace.prefill_tokens / max(steps[0], 1e-9)
            # The first quartile of the steps, since other engines may use the device meanwhile; not the least, since a
            # step that seems to take no time follows one at which the host was late.
            decodes = sorted(steps[1:]) or [0.0]
            self.trace.decode_step_ms = 1e3 * decodes[len(decodes) // 4]
        self.finished = self._stage == len(self._stages) - 1
