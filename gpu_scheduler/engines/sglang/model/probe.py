"""Requests of the engine's own after a load: they prove that the model speaks, or embeds, and measure it.

They go through SGLang like any other, one stage after the other: a short one so that lazy initialisation is not
measured, then the one that counts. On a GPU that one is a whole chunk, so that the process has taken what it will ever
take of the device when it is measured; and others follow that go on where it ended, one alone and a few together, as
requests do that come with all but a few tokens cached. Kernels that are launched for the first time are loaded, or
compiled, first: half a second that nobody who waits for a token should pay.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from protos import common_pb2, engine_pb2

_FIRST_PROMPT = 5
"""So short that no graph has it."""
PROMPT_TOKENS = 128
_NEW_TOKENS = 6
_MEASURED = 1
"""The stage that counts."""


@dataclass
class ProbeTrace:
    """What the model said, and how fast."""

    token_ids: list[int] = field(default_factory=list)
    values: list[float] = field(default_factory=list)
    """Log-probabilities of the tokens, or of embeddings all that they are."""
    prefill_tokens: int = 0
    """Of the step by which the next is measured."""
    prefill_tokens_per_s: float = 0.0
    decode_step_ms: float = 0.0


class Probe:
    """Runs until `finished`; `next_requests` gives the stages in turn."""

    def __init__(
        self,
        vocab_size: int,
        context_tokens: int,
        prompt_tokens: int = PROMPT_TOKENS,
        together: int = 0,
        embeds: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`prompt_tokens`: of the stage that counts. `together`: how many go on at once where that ended, after one
        that does it alone; 0: none does."""
        self.trace = ProbeTrace()
        self.finished = False
        self.problem = ""
        """Why it did not run to its end."""
        self._embeds = embeds
        self._clock = clock
        self._vocab_size = vocab_size
        # What goes on where the one that counts ended has to fit too: cut at its beginning it would go on nowhere.
        room = context_tokens - _NEW_TOKENS - (1 + together if together else 0)
        first, counts = (
            self._prompt(number, max(1, min(tokens, room)))
            for number, tokens in enumerate((_FIRST_PROMPT, prompt_tokens))
        )
        self._stages = [[first], [counts]]
        for number, few in enumerate((1, together) if together else (), start=2):
            self._stages.append([[*counts, *self._prompt(number * few + each, 2 + each)] for each in range(few)])
        self._stage = -1
        self._open = 0
        self._times: list[float] = []

    def _prompt(self, number: int, tokens: int) -> list[int]:
        """Others for every number, so that none finds the prefix of another."""
        return [(7919 * (i + 1) + 31 * number) % self._vocab_size for i in range(tokens)]

    def has(self, rid: str) -> bool:
        """Whether it is one of the stage that runs."""
        return rid.startswith(f"0:probe-{self._stage}.")

    @property
    def proves(self) -> bool:
        """Whether what runs now decides if there is a model. What follows only measures, and has kernels loaded."""
        return not self.finished and self._stage <= _MEASURED

    def next_requests(self) -> list[engine_pb2.Generate]:
        """The next stage if the one before has ended."""
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
        """It cannot go on, which is a problem only while it `proves`."""
        if self.proves:
            self.problem = problem
        self.finished = True

    def heard(self, token_ids: list[int], values: list[float], ended: bool) -> None:
        """Tokens of one of the running stage with their log-probabilities, or its embedding."""
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
            # Others may use the device meanwhile, and the host was late once if a step seems to be no time at all.
            decodes = sorted(steps[1:]) or [0.0]
            self.trace.decode_step_ms = 1e3 * decodes[len(decodes) // 4]
        self.finished = self._stage == len(self._stages) - 1
