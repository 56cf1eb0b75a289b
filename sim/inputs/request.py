"""A request on its way through the simulation."""

from __future__ import annotations

from math import inf, isnan, nan


class SimulatedRequest:
    """A request. Times are seconds of the virtual clock; nan: not yet."""

    __slots__ = (
        "arrival",
        "committed",
        "deadline",
        "ended_at",
        "failed",
        "finish_step",
        "first_at",
        "generated",
        "given_at",
        "id",
        "joined_at",
        "joined_step",
        "model",
        "output_tokens",
        "parked",
        "prefilled",
        "prompt_tokens",
        "tpot_s",
        "ttft_s",
    )

    def __init__(
        self,
        id: str,
        model: str,
        arrival: float,
        prompt_tokens: int,
        output_tokens: int,
        ttft_s: float = inf,
        tpot_s: float = inf,
    ) -> None:
        self.id = id
        self.model = model
        self.arrival = arrival
        self.prompt_tokens = prompt_tokens
        self.output_tokens = output_tokens
        self.ttft_s = ttft_s
        """TTFT target in seconds."""
        self.tpot_s = tpot_s
        """TPOT target in seconds."""
        self.deadline = arrival + ttft_s
        self.first_at = nan
        self.ended_at = nan
        self.failed = ""
        """Why the request was not served; empty if it was, or still may be."""
        self.prefilled = 0
        """Tokens of `to_prefill` that are prefilled in the attempt under way."""
        self.generated = 0
        """Output tokens; up to date whenever the request is not in a decoding batch."""
        self.parked = 0
        """How often its engine had to park it."""
        self.committed = 0
        """Bytes of KV on each device with which it was admitted."""
        self.given_at = nan
        """Second at which its engine last got it."""
        self.joined_step = self.finish_step = 0
        """Numbers of its engine's decode steps: when it joined the batch, and when its last token is out."""
        self.joined_at = nan
        """Second at which it joined the batch."""

    def __repr__(self) -> str:
        tokens = f"{self.prompt_tokens}+{self.output_tokens}, {self.generated} out"
        return f"SimulatedRequest({self.id}, {self.model}, {tokens})"

    @property
    def to_prefill(self) -> int:
        """Tokens that an engine has to prefill if it starts anew: the prompt, and what was generated before it was
        parked."""
        return self.prompt_tokens + self.generated

    @property
    def most_new_tokens(self) -> int:
        return self.output_tokens - self.generated

    @property
    def served(self) -> bool:
        return not isnan(self.ended_at)

    @property
    def ttft(self) -> float:
        return self.first_at - self.arrival

    @property
    def tpot(self) -> float:
        """Mean seconds for each token after the first; nan if there are none."""
        return (self.ended_at - self.first_at) / (self.output_tokens - 1) if self.output_tokens > 1 else nan
