"""Configuration of placement."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar, Literal

from pydantic import Field, model_validator

from placement.policy.assignment.assign import AssignRules
from placement.policy.assignment.moves import MoveRules
from placement.policy.assignment.rebalance import RebalanceRules
from placement.policy.lifecycle.decisions import LifecycleRules
from placement.policy.replication import ReplicationRules
from placement.policy.window import RateWindow
from services.runtime.config import Config
from services.wording.addresses import Address

MEMBERS = ("groups", "loaders", "balloond")
PAPER: Mapping[str, Any] = {
    "load_weight": 0.0,
    "tau": 0.3,
    "idle_s": 45.0,
    "kv_idle_s": 45.0,
    "relieve": False,
    "first_do_no_harm": False,
    "most_replicas": 1,
}
"""Settings with the rules of the Prism paper. Besides, rates are those of the whole window, and Algorithm 1 is not
followed by local search."""


class PlacementConfig(Config):
    """One cluster. `groups`, `loaders` and `balloond` are taken up again when the file changes; in each,
    `dns:HOST:PORT` stands for PORT at every address of HOST."""

    REMOVED: ClassVar[Mapping[str, str]] = {
        "least_pressure": "models move only where requests miss their targets",
        "least_share": "a model moves only with a tenth of the demand on its devices",
        "yield_drain_ms": "what a model that makes way has running goes on elsewhere at once",
        "migrations_at_once": "placement begins one migration at a time",
    }

    groups: list[Address]
    """gRPC addresses of the gpu_schedulers. The names of their groups are unique in the cluster."""
    loaders: list[Address] = Field(min_length=1)
    """gRPC addresses of the nodes' loaders, whose catalogues list the same models. A model that only some list is
    served too, without an image on the nodes that do not list it. A model that a call adds is added to all."""
    balloond: list[Address] = []
    """gRPC addresses of the nodes' balloonds, whose ledgers give the memory in KVPR. Empty: the groups' reports give
    it."""
    look_up_s: float = Field(default=5.0, gt=0)
    """Time from one DNS lookup of the members' names to the next."""
    period_s: float = Field(default=1.0, gt=0)
    """Time from one search for models that should move to the next."""
    rules: Literal["prism", "paper"] = "prism"
    """Which rules the settings begin with: Prism's, or those of the Prism paper (KVPR alone with a `tau` of 0.3, models
    leave after 45 s without requests and never for others' KV, moves for pressure alone, no local search, no replicas,
    nothing known at a start). Settings that are given go before either."""
    load_weight: float = Field(default=100.0, ge=0)
    """Weight of demand by itself in a device's pressure, W / (memory left) + load_weight * W / S, where W is the
    demand of its models and S its memory, since demand loads the device's compute too. At 100 both terms are equal when
    a hundredth of S is left. 0: the paper's KVPR, memory alone."""
    tau: float = Field(default=0.2, ge=0)
    """A model moves only for a gain in pressure above this share (Algorithm 1's threshold)."""
    home: float = Field(default=0.75, ge=0, le=1)
    """A model leaves the group where it hibernates, to start cold elsewhere, only for a gain above this share."""
    first_do_no_harm: bool = True
    """True: models move only where a device's memory is overbooked, or, once each, off a place that was chosen before
    their traffic was known and where requests are late or missed a target in the last 20 s; and never where that would
    put models to sleep that are asked for again more often than targets are missed. False: for a gain in pressure above
    `tau` alone."""
    cool_down_s: float = Field(default=120.0, ge=0)
    """Least time between two moves of a model."""
    idle_s: float = Field(default=1.0, ge=0)
    """Least idle time after which a model may be evicted for another one's activation."""
    stay: float = Field(default=4.0, ge=0)
    """A model that has been awake for less than so many times what bringing it back would take is not evicted: `stay`
    times its wake-up time, or its cold start where there is no image of its weights."""
    patience_s: float = Field(default=2.0, ge=0)
    """Time that a model waits for room before a group is reserved for it, on which busy models have to make way."""
    quantum_s: float = Field(default=4.0, ge=0)
    """Least time that a busy model is awake before it has to make way for one that waits (`patience_s`)."""
    kv_idle_s: float = Field(default=1.0, ge=0)
    """Least idle time after which a model hibernates if others on its group lack memory for KV."""
    headroom: float = Field(default=0.4, ge=0, lt=1)
    """Share of a device's KV memory that running requests have to leave free; with less, idle models hibernate."""
    hold_s: float = Field(default=5.0, ge=0)
    """Time that a gateway's call for a model waits for room before it is refused; less than the 10 s that
    the call may take."""
    relieve: bool = True
    """False: idle models leave for activations only, not for others' KV."""
    window_s: float = Field(default=60.0, gt=0, le=86_400)
    """Window over which a model's token rate is taken, or `short_window_s` if the rate was higher in that."""
    short_window_s: float = Field(default=20.0, ge=1)
    """Second, shorter window of token rates, so that a burst counts before it is over; at most `window_s`."""
    default_tpot_ms: float = Field(default=100.0, gt=0)
    """TPOT target by which the demand of models without one is weighted."""
    drain_ms: int = Field(default=30_000, ge=0)
    """Time that the source of a migration has for running requests that do not move along with their KV."""
    traffic_file: str = ""
    """File in which placement keeps what each model was asked for in each hour of the last two days: after a restart
    it places models by that for ten minutes, less and less. Written once a minute and at the end; where it is missing
    or damaged nothing is known at the start. Empty: none."""
    move_kv: bool = True
    """True: a model that moves between groups of one node takes the KV of its running requests along."""
    rebalance: bool = True
    """False: placement begins no migration by itself; activation and eviction go on."""
    most_replicas: int = Field(default=4, ge=1)
    """Most groups that serve a model at once: one whose requests are late although most of the demand on its group is
    its own comes up on a further group. 1: no replicas. Only with `rebalance`."""
    places: dict[str, str] = {}
    """Groups by model, for models that come up on that group and no other. Only without `rebalance`."""
    hibernate: bool = True
    """False: a model that has to leave goes cold: its engine is given back."""
    exclusive: bool = False
    """True: a model has a group for itself while it is active. It comes up where all other models may leave, and they
    leave, the longest idle first."""

    @property
    def lifecycle(self) -> LifecycleRules:
        """Rules of activation and eviction."""
        return LifecycleRules(
            idle_s=self.idle_s,
            stay=self.stay,
            tau=self.tau,
            home=self.home,
            hibernate=self.hibernate,
            exclusive=self.exclusive,
            quantum_s=self.quantum_s,
            kv_idle_s=self.kv_idle_s,
            headroom=self.headroom,
        )

    @property
    def moves(self) -> RebalanceRules:
        """Rules of the moves that placement begins by itself."""
        assign = AssignRules(tau=self.tau, cool_down_s=self.cool_down_s)
        return RebalanceRules(
            replace(assign, improve_steps=0) if self.rules == "paper" else assign,
            MoveRules(cool_down_s=self.cool_down_s),
            self.first_do_no_harm,
            self.headroom,
        )

    @property
    def remembers(self) -> bool:
        """Whether the traffic of earlier hours says where models belong at a start; not by the paper's rules."""
        return self.rules != "paper"

    @property
    def replication(self) -> ReplicationRules:
        """Rules of the groups of one model."""
        return ReplicationRules(most=self.most_replicas if self.rebalance else 1)

    def window(self) -> RateWindow:
        """A new window of one model's tokens."""
        return RateWindow(window_s=self.window_s, short_s=self.short_window_s)

    @property
    def members(self) -> dict[str, list[str]]:
        """Addresses by kind of member (`MEMBERS`)."""
        return {kind: getattr(self, kind) for kind in MEMBERS}

    @model_validator(mode="before")
    @classmethod
    def _with_the_rules(cls, given: Any) -> Any:
        if not isinstance(given, Mapping) or given.get("rules") != "paper":
            return given
        return {**PAPER, "short_window_s": given.get("window_s", 60.0), **given}

    @model_validator(mode="after")
    def _the_short_window_is_the_shorter_one(self) -> PlacementConfig:
        if self.window_s < self.short_window_s:
            raise ValueError(f"window_s is {self.window_s:g}, shorter than short_window_s, {self.short_window_s:g}")
        return self

    @model_validator(mode="after")
    def _what_has_its_place_does_not_move(self) -> PlacementConfig:
        if self.places and self.rebalance:
            raise ValueError("places are for good: rebalance has to be false with them")
        return self
