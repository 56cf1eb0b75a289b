"""Configuration of placement."""

from __future__ import annotations

from pydantic import Field, model_validator

from placement.policy.lifecycle.decisions import LifecycleRules
from services.runtime.config import Config
from services.wording.addresses import Address

MEMBERS = ("groups", "loaders", "balloond")


class PlacementConfig(Config):
    """One cluster. `groups`, `loaders` and `balloond` are taken up again when the file changes; in each,
    `dns:HOST:PORT` stands for PORT at every address of HOST."""

    groups: list[Address]
    """gRPC addresses of the gpu_schedulers, whose `group`s have names of their own in the cluster."""
    loaders: list[Address] = Field(min_length=1)
    """gRPC addresses of the nodes' loaders. Every node's file lists the same models; one that only some list is served
    too, and where it is not listed without an image. What calls add, all get."""
    balloond: list[Address] = []
    """gRPC addresses of the nodes' balloonds: their ledgers are the S of pressure. Without them the groups' reports
    count."""
    look_up_s: float = Field(default=5.0, gt=0)
    """How often names are looked up."""
    period_s: float = Field(default=1.0, gt=0)
    """How often placement looks whether a model should move."""
    load_weight: float = Field(default=100.0, ge=0)
    """Demand loads a device's compute too: pressure is W / (memory left) + load_weight * W / S. So what is left counts
    for as much as demand itself only where it is a hundredth of S. 0: the paper's KVPR, memory alone."""
    tau: float = Field(default=0.2, ge=0)
    """A model moves only for a gain in pressure above this share (Algorithm 1's threshold)."""
    home: float = Field(default=0.75, ge=0, le=1)
    """A model leaves the group where it hibernates, to start cold elsewhere, only for a gain above this share."""
    least_pressure: float = Field(default=2.0, ge=0)
    """Below it nothing moves off a group: a move would cost more than it brings. A device without weights comes to it
    with a TPOT target of 0.1 s when requests of 10 s use 2 % of its memory."""
    least_share: float = Field(default=0.1, ge=0, le=1)
    """Nor does a model with a smaller share of the demand on its devices."""
    cool_down_s: float = Field(default=120.0, ge=0)
    """A model that moved stays at least this long."""
    idle_s: float = Field(default=1.0, ge=0)
    """A model idle for longer may be evicted, when its memory is wanted for another one's activation."""
    stay: float = Field(default=4.0, ge=0)
    """A model that has been awake for less than so many times what bringing it back would take is not evicted: `stay`
    times its wake-up time, or its cold start where there is no image of its weights."""
    patience_s: float = Field(default=2.0, ge=0)
    """A model that has waited for so long, with no idle one to make way, is promised the place of a busy one."""
    quantum_s: float = Field(default=4.0, ge=0)
    """How long a model is awake at least before that happens to it."""
    yield_drain_ms: int = Field(default=0, ge=0)
    """How long those that make way may go on with what they run."""
    kv_idle_s: float = Field(default=1.0, ge=0)
    """A model idle for longer hibernates when others on its group lack memory for KV."""
    headroom: float = Field(default=0.4, ge=0, lt=1)
    """They do when running requests leave less than this share of it."""
    hold_s: float = Field(default=5.0, ge=0)
    """How long a gateway that asks for a model waits for room before it is told that there is none; less than its own
    patience with placement (`activate_time_out_s`)."""
    relieve: bool = True
    """Off: idle models leave for activations only."""
    window_s: float = Field(default=60.0, gt=0)
    """A model's demand is its tokens of this time, or of the shorter one below where they came faster."""
    short_window_s: float = Field(default=20.0, ge=1)
    """So that a burst counts before it is over; at most `window_s`."""
    default_tpot_ms: float = Field(default=100.0, gt=0)
    """Of models without a target: what their demand is weighted by."""
    drain_ms: int = Field(default=30_000, ge=0)
    """How long the source of a migration may finish what it runs, where that does not go along with its KV."""
    move_kv: bool = True
    """Between groups of one node a model takes the KV of what runs along."""
    migrations_at_once: int = Field(default=1, ge=1)
    """Of those that placement begins by itself."""
    rebalance: bool = True
    """Off: nothing moves by itself; activation and eviction go on."""
    places: dict[str, str] = {}
    """Model -> the group that it comes up on and no other. Only without `rebalance`."""
    hibernate: bool = True
    """False: a model that has to leave goes cold, and the engine forgets it."""
    exclusive: bool = False
    """A model has a group for itself while it is active: it comes up where all others may leave, and they do, the
    longest idle first."""

    @property
    def lifecycle(self) -> LifecycleRules:
        """Of activation and eviction."""
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
    def members(self) -> dict[str, list[str]]:
        """The addresses of each kind."""
        return {kind: getattr(self, kind) for kind in MEMBERS}

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
