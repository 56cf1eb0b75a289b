"""A request of the engine's own after a load: proves that the model speaks, and measures it.

It goes through SGLang like any other, one stage after the other: a short one so that lazy initialisation is not
measured, then the one that counts. On a GPU that one is a whole chunk, so that the process has taken what it will ever
take of the device when it is measured.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from protos import common_pb2, engine_pb2

_FIRST_PROMPT = 5
"""So short that no graph has it: who goes on with all but a few tokens cached should not be the first to launch these
kernels, which takes 0.2 s where they are compiled."""
PROMPT_TOKENS = 128
_NEW_TOKENS = 6


@dataclass
class Trace:
    """What the model said, and how fast."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    prefill_tokens_per_s: float = 0.0
    decode_step_ms: float = 0.0


class Probe:
    """Runs until `finished`; `next_request` gives the stages in turn."""

    def __init__(
        self,
        vocab_size: int,
        context_tokens: int,
        prompt_tokens: int = PROMPT_TOKENS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`prompt_tokens`: of the stage that counts."""
        self.trace = Trace()
        self.finished = False
        self.problem = ""
        """Why it did not run to its end."""
        self._clock = clock
        self._vocab_size = vocab_size
        room = context_tokens - _NEW_TOKENS
        self._stages = [max(1, min(tokens, room)) for tokens in (_FIRST_PROMPT, prompt_tokens)]
        self._stage = -1
        self._waits = True
        self._times: list[float] = []

    @property
    def rid(self) -> str:
        return f"0:probe-{self._stage}"

    def next_request(self) -> engine_pb2.Generate | None:
        """The next stage if the one before has ended."""
        if not self._waits or self.finished:
            return None
        self._waits = False
        self._stage += 1
        # Different in every stage, so that no stage finds the prefix of another.
        prompt = [(7919 * (i + 1) + 31 * self._stage) % self._vocab_size for i in range(self._stages[self._stage])]
        self._times = [self._clock()]
        return engine_pb2.Generate(
            request_id=self.rid,
            token_ids=prompt,
            sampling=common_pb2.Sampling(max_new_tokens=_NEW_TOKENS, ignore_eos=True, logprobs=True),
        )

    def stop(self, problem: str) -> None:
        self.finished, self.problem = True, problem

    def heard(self, token_ids: list[int], logprobs: list[float], ended: bool) -> None:
        """Tokens of the running stage."""
        self._times.append(self._clock())
        self.trace.token_ids += token_ids
        self.trace.logprobs += logprobs
        if not ended:
            return
        self._waits = True
        if self._stage == len(self._stages) - 1:
            steps = [later - earlier for earlier, later in zip(self._times, self._times[1:], strict=False)]
            self.trace.prefill_tokens_per_s = self._stages[-1] / max(steps[0], 1e-9)
            decodes = sorted(steps[1:]) or [0.0]
            self.trace.decode_step_ms = 1e3 * decodes[len(decodes) // 2]
            self.finished = True
