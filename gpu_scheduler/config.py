"""Configuration of a gpu_scheduler."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, field_validator

from services.config import Config, Section


class Engines(Section):
    """The engine processes of a group."""

    kind: Literal["sglang", "echo"] = "sglang"
    """For models whose catalogue entry names none."""
    warm: int = Field(default=1, ge=0)
    """Engines kept with their imports done, for the next model."""
    limit: int = Field(default=4, ge=1)
    """Most engine processes of the group."""
    start_timeout_s: float = Field(default=180.0, gt=0)
    load_timeout_s: float = Field(default=600.0, gt=0)
    """For one residency command; a checkpoint from a slow disk takes minutes."""
    log_level: str = "warning"
    kv_extent_bytes: int = Field(default=256 << 10, gt=0)
    """On CUDA 2 to 8 MiB: small enough to come back, large enough that growing is fast."""
    weights_extent_bytes: int = Field(default=512 << 10, gt=0)
    """On CUDA 64 MiB."""
    poison_fresh_pages: bool = False
    """Fill newly mapped KV with NaN: a wrong slot cannot pass a test."""
    options: dict[str, str] = {}
    """Handed to every engine: chunked prefill size, maximum running requests and the like."""


class Arbitration(Section):
    """Numbers of the shared queue; see gpu_scheduler/policy."""

    chunk_tokens: int = Field(default=2048, gt=0)
    """Prompt tokens that may be on their way to be prefilled at a time."""
    default_prefill_tokens_per_s: float = Field(default=2000.0, gt=0)
    """Until an engine has measured its model."""
    wake_estimate_s: float = Field(default=5.0, gt=0)
    """Rest of a wake-up of a model that was never woken here."""


class GpuSchedulerConfig(Config):
    """One group."""

    group: str
    devices: list[str]
    address: str = ""
    """Where gateways reach it; `listen` when empty."""
    balloond: str
    """gRPC address of the node's balloond; empty: engines hold no memory of ours (echo engines in tests)."""
    balloond_handoff: str = ""
    """Path of balloond's SEQPACKET socket."""
    loader: str = ""
    engines: Engines = Engines()
    arbitration: Arbitration = Arbitration()

    @field_validator("devices")
    @classmethod
    def _one_device(cls, devices: list[str]) -> list[str]:
        if len(devices) != 1:
            raise ValueError(f"a group has exactly one device in this version, not {len(devices)}")
        return devices
