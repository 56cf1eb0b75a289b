"""Configuration of a gpu_scheduler."""

from __future__ import annotations

import re
from math import inf
from typing import Any, ClassVar, Literal

from pydantic import Field, field_validator, model_validator

from gpu_scheduler.engines import kinds
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

    kind: Literal["sglang", "echo"] = "sglang"
    """For models whose catalogue entry names none."""
    warm: int = Field(default=1, ge=0)
    """Engines kept with their imports done, for the next model."""
    limit: int = Field(default=4, ge=1)
    """Most engine processes of the group, and with that most models that are awake or hibernate there. For one more, a
    model that is idle or hibernates goes cold."""
    start_timeout_s: float = Field(default=180.0, gt=0)
    """From an engine process's start until it says that it is there, its imports done."""
    load_timeout_s: float = Field(default=600.0, gt=0)
    """For one residency command; a checkpoint from a slow disk takes minutes."""
    stall_timeout_s: float = Field(default=30.0, ge=0)
    """An engine with requests, or with a command beside which it can answer, that says nothing for so long, though it
    is asked, is killed and replaced (policy/hang_detector.py); four times what its prompts should take comes on top. 0:
    never. Longer than Triton takes for a kernel while an engine serves; one that has nvcc compile says so, and is not
    given up meanwhile."""
    log_level: Literal["debug", "info", "warning", "error"] = "warning"
    """Of the engines' own lines, SGLang's among them."""
    kv_extent_bytes: int | None = Field(default=None, gt=0)
    """Small enough to come back, large enough that growing is fast; left out, 8 MiB on CUDA (2 and 4 do as well) and
    256 KiB on the CPU."""
    weights_extent_bytes: int | None = Field(default=None, gt=0)
    """Left out, 32 MiB on CUDA and 512 KiB on the CPU."""
    poison_fresh_pages: bool = False
    """Fill newly mapped KV with NaN: a wrong slot cannot pass a test."""
    options: dict[str, str] = {}
    """Handed to every engine: chunked prefill size, maximum running requests and the like. Numbers, or their text."""

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


class Arbitration(ConfigSection):
    """The shared queue; see gpu_scheduler/policy."""

    chunk_tokens: int = Field(default=2048, gt=0)
    """Prompt tokens of one model that may be on their way to be prefilled at a time, more if that takes no longer than
    `joint_s`."""
    late_share: float = Field(default=0.05, ge=0, le=1)
    """Of the time of prefills, what requests that are late already and those without a target may claim while others
    can still be on time (gpu_scheduler/policy/queue/ageing.py). 0: they wait until none can."""
    joint_s: float = Field(default=0.1, ge=0)
    """Prefills of several engines may be under way together if they would take no longer than this one after another;
    longer prompts are prefilled one after another (policy/queue/admission.py). 0: strictly one engine at a time, with
    `chunk_tokens` of its prompts."""
    precedence_ms: float = Field(default=50.0, ge=0, le=10_000)
    """How long decode steps wait at most while another engine prefills (engines/sharing/prefill_priority.py). 0: they
    share the devices with it."""
    precedence_batch: int = Field(default=16, ge=0, le=65_535)
    """Engines that decode for more requests than this, for each prompt that is prefilled or waits behind it at its
    engine, share the devices with it at once. 0: they wait, however many."""
    decode_turn_ms: float = Field(default=50.0, ge=0, le=10_000)
    """How long decode steps wait at most for those of engines that need less of the devices for each request that is to
    keep its TPOT target, where there is not enough for all, and, where each request has a step in hand, for any of
    which one has not (engines/sharing/decode_arbitration.py). 0: they share the devices."""
    stop_decodes: bool = False
    """Running requests of other models stop, and are computed again later, for one that can still meet its TTFT target
    and whose model is past its floor. Up to its floor a model always gets its memory so."""
    forecast_tokens: int = Field(default=128, ge=0)
    """Output tokens for which a request must find memory beside its prompt to start, before any request of its model
    has ended (policy/memory/forecast.py); never more than it may generate."""
    forecast_weight: float = Field(default=0.1, ge=0, le=1)
    """Of each request that ended, in the moving average that takes its place. 0: `forecast_tokens` stays."""
    default_tpot_ms: float = Field(default=100.0, gt=0)
    """What is kept for requests whose model and client name no TPOT target."""
    default_prefill_tokens_per_s: float = Field(default=2000.0, gt=0)
    """Until an engine has measured its model."""
    wake_estimate_s: float = Field(default=5.0, gt=0)
    """Rest of a wake-up of a model that was never woken here."""
    experiments: Experiments = Experiments()

    @model_validator(mode="before")
    @classmethod
    def _switches_that_have_moved(cls, given: Any) -> Any:
        """Until 1.1 the switches of `experiments` stood among the settings of arbitration; there they still work."""
        if not isinstance(given, dict) or not (moved := given.keys() & Experiments.model_fields.keys()):
            return given
        kept = {name: value for name, value in given.items() if name not in moved}
        return {**kept, "experiments": {**given.get("experiments", {}), **{name: given[name] for name in moved}}}

    @property
    def turn(self) -> admission.PrefillLimits:
        return admission.PrefillLimits(
            self.chunk_tokens, joint_s=self.joint_s if self.experiments.prefill_turn else inf
        )

    @property
    def backlog(self) -> BacklogRules:
        """Of the queue."""
        return BacklogRules(order=self.experiments.order, late_share=self.late_share)

    @property
    def forecast(self) -> ForecastRules:
        """Of output lengths."""
        return ForecastRules(self.forecast_tokens, self.forecast_weight)


class GpuSchedulerConfig(Config):
    """One group."""

    group: str
    """Its name, which no other has in the cluster."""
    devices: list[str]
    """It serves models that are spread over exactly so many."""
    address: AddressOrNone = ""
    """Where gateways reach it; `listen` when empty."""
    balloond: AddressOrNone
    """gRPC address of the node's balloond; empty: engines hold no memory of ours (echo engines in tests)."""
    balloond_handoff: SocketPathOrNone = ""
    """Path of balloond's SEQPACKET socket."""
    loader: AddressOrNone = ""
    """gRPC address of the node's loader; empty: there are no images, every start is from the checkpoint."""
    traces: bool = False
    """Spans of activations, and of the requests that a gateway traces, by OTLP over HTTP; OTEL_EXPORTER_OTLP_ENDPOINT
    and other variables of OpenTelemetry's say where to, and of how many (docs/operate/monitoring.md)."""
    elastic_kv: bool = True
    """False: a model's limit is its floor (`floor_tokens` in the catalogue) as long as it is here, unless an operator
    sets another, and no room is made for its requests: memory is divided, as if every engine had a pool of its own."""
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
