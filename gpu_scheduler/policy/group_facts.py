"""Inputs of a group's core, and its records: settings, requests as they arrive, and models with their engines."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from math import inf

from gpu_scheduler.engines.sharing.throttle import PrefillThrottle
from gpu_scheduler.policy.memory.demand import TokenRate
from gpu_scheduler.policy.memory.forecast import ForecastRules, OutputForecast
from gpu_scheduler.policy.queue.admission import PrefillLimits
from gpu_scheduler.policy.queue.backlog import BacklogRules
from gpu_scheduler.policy.queue.slack import PrefillSpeed
from kv_kinds.layout import KvLayout, of_tokens


@dataclass(frozen=True, slots=True)
class GroupRules:
    """The settings of a group's arbitration; `gpu_scheduler/config.py` (`Arbitration`, `rules`) makes them from a
    configuration."""

    limits: PrefillLimits = field(default_factory=PrefillLimits)
    backlog: BacklogRules = field(default_factory=BacklogRules)
    forecast: ForecastRules = field(default_factory=ForecastRules)
    tpot_s: float = 0.1
    """TPOT target, in seconds, of requests that name none."""
    prefill_tokens_per_s: float = 2000.0
    """Prefill speed of a model that no engine has measured."""
    wake_s: float = 5.0
    """Seconds that coming up is expected to take of a model that never came up here."""
    throttles: bool = True
    """False: no prefill is throttled for its neighbours' decodes."""


@dataclass(slots=True)
class ArrivedRequest:
    """A request as it arrives at the group. Times are seconds on the caller's clock."""

    id: str
    model: str
    arrival: float
    """When the request entered the system."""
    prompt_tokens: int
    """Tokens that have to be prefilled: the prompt, and the tokens of the answer that other engines generated."""
    most_new_tokens: int
    """Most tokens that may still be generated."""
    deadline: float = inf
    """When the first token is due; +inf: the request has no TTFT target."""
    tpot_s: float = 0.0
    """TPOT target in seconds; 0: none."""
    resumed: bool = False
    """True if an answer that was interrupted elsewhere goes on here: its first token is out."""
    cached_tokens: int = 0
    """First tokens of the prompt whose KV came here with the model."""
    expires: float = inf
    """When the request is thrown away if it still waits; +inf: never."""
    drop_late: bool = False
    """True if the request is thrown away once its TTFT target cannot be met."""


class Presence(Enum):
    """Whether requests of a model may start on the group."""

    ACTIVE = "active"
    """They may."""
    WAKING = "waking"
    """The model is coming up."""
    DOWN = "down"
    """The model hibernates, is cold or on its way there, or failed; nothing brings it up."""
    GONE = "gone"
    """The group has no record of the model any more."""


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """One model on the group, and what its engine measured of itself when it came up. Bytes are on each device; 0
    is unknown, except for `most_running`."""

    presence: Presence
    kv: KvLayout = of_tokens(1)
    """The kinds of KV that its requests need."""
    prefill_tokens_per_s: float = 0.0
    prefill_chunk_tokens: int = 0
    """Tokens of the prefill step that `prefill_tokens_per_s` was measured with."""
    decode_step_s: float = 0.0
    """Seconds of a decode step with one request."""
    most_running: int = 0
    """Most requests that the engine runs at a time; 0: no bound."""
    up_s: float = 0.0
    """Seconds that coming up took the last time that it began from the same state (hibernating or cold)."""
    cold_s: float = 0.0
    """Seconds that the last start in an engine without the model took."""


RETURN_S = 1.0
"""Seconds without requests after which the next one counts as a return of the model. It may have been put to sleep
by then."""


@dataclass(slots=True)
class ServedModel:
    """The group's record of a model and of its requests. Times are seconds on the caller's clock."""

    speed: PrefillSpeed
    forecast: OutputForecast
    last_event: float
    """When its last request arrived or ended, or else when the group first heard of the model."""
    facts: ModelFacts = field(default_factory=lambda: ModelFacts(Presence.DOWN))
    rate: TokenRate = field(default_factory=TokenRate)
    tpot_s: float = 0.0
    """TPOT target, in seconds, of the last request that named one; 0: none did."""
    cold_s: float = 0.0
    """Seconds that the last start in an engine without the model took, also if its record was made anew since; 0: not
    known."""
    requests: int = 0
    """Requests that wait or run."""
    running: int = 0
    """Requests that the engine has."""
    committed: int = 0
    """KV bytes on each device that the requests which the engine has were admitted with."""
    throttle: PrefillThrottle | None = None
    """The throttle that its engine was last told; None: its engine was told none."""
    ttft_met: int = 0
    ttft_missed: int = 0
    """First tokens that came in time, and too late, of requests with a TTFT target."""
    tpot_missed: int = 0
    """Requests that ended here with more time for each token after the first than their TPOT target."""
    ttft_s: float = 0.0
    """TTFT target, in seconds, of the last request that had one; 0: none had."""
    arrived: int = 0
    """Requests that came, but for those that had begun elsewhere."""
    returns: int = 0
    """Requests that found the model without any for RETURN_S or longer."""
