"""Configuration of a gpu_scheduler."""

from __future__ import annotations

import re
from collections.abc import Mapping
from math import inf
from typing import Any, ClassVar, Literal

from pydantic import Field, field_validator, model_validator

from gpu_scheduler.engines import kinds
from gpu_scheduler.policy.group_facts import GroupRules
from gpu_scheduler.policy.memory.forecast import ForecastRules
from gpu_scheduler.policy.queue import admission
from gpu_scheduler.policy.queue.backlog import BacklogRules
from services.runtime.config import Config, ConfigSection
from services.wording.addresses import AddressOrNone, SocketPathOrNone

_EXTENT_BYTES = {"cpu": (256 << 10, 512 << 10), "cuda": (8 << 20, 32 << 20)}
"""Of KV and of weights, by kind of device. On CUDA mapping costs by the extent, whatever its size; but large ones
(eight times these, of weights twelve) of 512 MiB are pages of another kind, and the first that a peer maps takes 9 ms
instead of 1.4."""

_DEVICE = re.compile(r"(cpu|cuda):\d+")
GROUP_SIZES = (1, 2, 4)
"""Devices of a group."""


class Engines(ConfigSection):
    """The engine processes of a group."""

    REMOVED: ClassVar[Mapping[str, str]] = {
        "options.window_pool": "models whose windows SGLang can keep in a pool of their own have one",
    }

    kind: Literal["sglang", "echo"] = "sglang"
    """Kind of engine for models whose catalogue entry names none."""
    warm: int = Field(default=1, ge=0)
    """Engine processes that are kept warm, their imports done, for the next model."""
    limit: int = Field(default=4, ge=1)
    """Most engine processes of the group, and with that most models that are awake or hibernate there. For one more, a
    model that is idle or hibernates goes cold."""
    start_timeout_s: float = Field(default=180.0, gt=0)
    """Longest time from an engine process's start until its imports are done; then the start counts as failed."""
    load_timeout_s: float = Field(default=600.0, gt=0)
    """Longest time for one command that changes a model's residency; a checkpoint from a slow disk takes minutes. While
    an engine compiles kernels it begins anew."""
    stall_timeout_s: float = Field(default=30.0, ge=0)
    """An engine that has work and sends nothing for so long, though it is pinged, is killed and replaced
    (policy/hang_detector.py); four times the expected time of its prompts comes on top. 0: never. It has to be longer
    than Triton compiles a kernel while an engine serves; an engine that waits for nvcc says so, and is not killed."""
    log_level: Literal["debug", "info", "warning", "error"] = "warning"
    """Least level of the log lines of engines, SGLang's among them."""
    kv_extent_bytes: int | None = Field(default=None, gt=0)
    """Bytes of one extent of KV: small enough to be returned, large enough that growth is fast. Left out: 8 MiB on CUDA
    (2 and 4 MiB do as well), 256 KiB on the CPU."""
    weights_extent_bytes: int | None = Field(default=None, gt=0)
    """Bytes of one extent of weights. Left out: 32 MiB on CUDA, 512 KiB on the CPU."""
    poison_fresh_pages: bool = False
    """True: newly mapped KV is filled with NaN, so that no test passes with a wrong slot. For tests."""
    options: dict[str, str] = {}
    """Options that are handed to every engine (below): chunked prefill size, maximum running requests and the like, as
    numbers or text."""

    @field_validator("options", mode="before")
    @classmethod
    def _numbers_are_text(cls, options: Any) -> Any:
        if not isinstance(options, dict):
            return options
        return {name: str(value) if type(value) is int else value for name, value in options.items()}

    @field_validator("options")
    @classmethod
    def _some_engine_has_them(cls, options: dict[str, str]) -> dict[str, str]:
        kinds.check_options(options)
        return options


class Experiments(ConfigSection):
    """Switches that take a rule away, to measure what it is worth. A group that serves needs none of them, and the
    reference of settings leaves them out."""

    IN_REFERENCE: ClassVar[bool] = False

    order: Literal["moore_hodgson", "arrival"] = "moore_hodgson"
    """"arrival": each model's requests are served in the order in which they came, whatever their targets."""
    prefill_turn: bool = True
    """False: prompts start as soon as there is memory for them, however many engines of the group prefill."""
    protect_decodes: bool = True
    """False: no prefill is throttled for the TPOT targets of neighbours (engines/sharing/throttle.py)."""


_RENAMED = {
    "precedence_ms": "prefill_priority_ms",
    "precedence_batch": "prefill_priority_batch",
    "decode_turn_ms": "decode_arbitration_ms",
}
"""Names of settings by those that they had until protocol 1.3."""


class Arbitration(ConfigSection):
    """The shared queue; see gpu_scheduler/policy."""

    REMOVED: ClassVar[Mapping[str, str]] = {
        "stop_decodes": "running requests stop only for a floor or an activation",
        "default_prefill_tokens_per_s": "until an engine has measured a model, 2000 tokens/s are assumed",
        "wake_estimate_s": "of a model that never came up on this group, 5 s are assumed",
    }

    chunk_tokens: int = Field(default=2048, gt=0)
    """Most prompt tokens of one model that are sent to its engine before it has prefilled them, unless more take no
    longer than `joint_s`."""
    late_share: float = Field(default=0.05, ge=0, le=1)
    """Share of the prefill time that requests which are late already, or have no target, may claim while others can
    still be on time (gpu_scheduler/policy/queue/ageing.py). 0: they wait until no other can be on time."""
    joint_s: float = Field(default=0.1, ge=0)
    """Prefills of several engines may be under way together if they would take no longer than this one after another;
    longer prompts are prefilled one after another (policy/queue/admission.py). 0: the
    prompts of one model at a time, and `chunk_tokens` of them."""
    prefill_priority_ms: float = Field(default=50.0, ge=0, le=10_000)
    """Longest time that an engine's decode steps wait while another engine prefills
    (engines/sharing/prefill_priority.py). 0: they share the devices with the prefill."""
    prefill_priority_batch: int = Field(default=16, ge=0, le=65_535)
    """An engine that decodes for more requests than this, for each prompt that is prefilled or waits at the other
    engine, does not wait for its prefills. 0: it always waits."""
    decode_arbitration_ms: float = Field(default=50.0, ge=0, le=10_000)
    """Longest time that a decode step waits, if the devices do not suffice for all targets, for engines that need less
    of them for each request to keep its TPOT target; or, if all of its own requests are a step ahead, for any engine
    with a request that is behind (engines/sharing/decode_arbitration.py). 0: decode steps share the devices."""
    forecast_tokens: int = Field(default=128, ge=0)
    """Forecast of the output tokens of a model of which no request has ended yet (policy/memory/forecast.py). A request
    starts when there is memory for its prompt and the forecast, or for all that it may generate if that is less."""
    forecast_weight: float = Field(default=0.1, ge=0, le=1)
    """Weight of each request that ends in the moving average that replaces `forecast_tokens`. 0: it is not replaced."""
    default_tpot_ms: float = Field(default=100.0, gt=0)
    """TPOT target of requests for which neither the model nor the client names one."""
    experiments: Experiments = Experiments()

    @model_validator(mode="before")
    @classmethod
    def _switches_that_have_moved(cls, given: Any) -> Any:
        """The switches of `experiments` stood among the settings of arbitration, and others had other names: both still
        work."""
        if not isinstance(given, dict):
            return given
        if twice := [old for old, new in _RENAMED.items() if old in given and new in given]:
            raise ValueError(f"{twice[0]} is {_RENAMED[twice[0]]} now: give one of them")
        given = {_RENAMED.get(name, name): value for name, value in given.items()}
        experiments = given.get("experiments", {})
        moved = {name: given.pop(name) for name in Experiments.model_fields.keys() & given.keys()}
        if not moved or not isinstance(experiments, dict):
            return given | moved
        return {**given, "experiments": {**experiments, **moved}}

    @property
    def prefill_limits(self) -> admission.PrefillLimits:
        return admission.PrefillLimits(
            self.chunk_tokens, joint_s=self.joint_s if self.experiments.prefill_turn else inf
        )

    @property
    def backlog(self) -> BacklogRules:
        """Rules of the shared queue."""
        return BacklogRules(order=self.experiments.order, late_share=self.late_share)

    @property
    def forecast(self) -> ForecastRules:
        """Rules of the forecast of output lengths."""
        return ForecastRules(self.forecast_tokens, self.forecast_weight)

    @property
    def group(self) -> GroupRules:
        """Rules of the group's core."""
        return GroupRules(
            self.prefill_limits,
            self.backlog,
            self.forecast,
            tpot_s=self.default_tpot_ms / 1e3,
            throttles=self.experiments.protect_decodes,
        )


class GpuSchedulerConfig(Config):
    """One group."""

    group: str
    """Name of the group, unique in the cluster."""
    devices: list[str]
    """Devices of the group: 1, 2 or 4. Each of its models is spread over all of them."""
    address: AddressOrNone = ""
    """Address by which gateways reach the group; empty: `listen`."""
    balloond: AddressOrNone
    """gRPC address of the node's balloond; empty: engines hold no memory of balloond's (echo engines in tests)."""
    balloond_handoff: SocketPathOrNone = ""
    """Path of balloond's SEQPACKET socket."""
    loader: AddressOrNone = ""
    """gRPC address of the node's loader; empty: there are no images, every start is from the checkpoint."""
    look_timeout_s: float = Field(default=10.0, gt=0)
    """Longest time that the loader may take to look at a model's files before an engine reads them. Without its answer
    the engine reads them all the same, and finds faults too."""
    traces: bool = False
    """True: spans of activations, and of the requests that a gateway traces, are exported by OTLP over HTTP.
    OpenTelemetry's own variables (OTEL_EXPORTER_OTLP_ENDPOINT and others) say where to, and how many
    (docs/operate/monitoring.md)."""
    elastic_kv: bool = True
    """False: a model's KV limit is its floor (`floor_tokens` in the catalogue) unless an operator sets another, and no
    room is made for its requests: memory is divided as if every engine had a pool of its own."""
    engines: Engines = Engines()
    arbitration: Arbitration = Arbitration()

    @property
    def kv_extent_bytes(self) -> int:
        return self.engines.kv_extent_bytes or self._default_extents[0]

    @property
    def weights_extent_bytes(self) -> int:
        return self.engines.weights_extent_bytes or self._default_extents[1]

    @property
    def _default_extents(self) -> tuple[int, int]:
        return _EXTENT_BYTES["cuda" if self.devices[0].startswith("cuda:") else "cpu"]

    @field_validator("devices")
    @classmethod
    def _can_share_a_model(cls, devices: list[str]) -> list[str]:
        if len(devices) not in GROUP_SIZES:
            raise ValueError(f"a group has 1, 2 or 4 devices, not {len(devices)}")
        for device in devices:
            if not _DEVICE.fullmatch(device):
                raise ValueError(f'device {device!r} is neither "cpu:N" nor "cuda:N"')
        if len(set(devices)) < len(devices):
            raise ValueError(f"{', '.join(devices)}: a device is named twice")
        if len({device.partition(":")[0] for device in devices}) > 1:
            raise ValueError(f"{', '.join(devices)} are not of one kind")
        return devices
