"""Configuration of balloond."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, Self

from pydantic import Field, field_validator, model_validator

from balloond import backends
from balloond.policy.capacity import KV_EXTENT
from balloond.policy.claims import ClaimPatience
from services.errors import Invalid
from services.runtime.config import Config, ConfigSection
from services.wording.addresses import SocketPath

_PATIENCE = ClaimPatience()
_GPU_SPARE_BYTES = 128 << 20


class DeviceConfig(ConfigSection):
    """A device of this node."""

    name: str
    """Name of the device, "cuda:0" or "cpu:0" for instance: the part before the colon names the backend."""
    capacity_bytes: int | None = Field(default=None, gt=0)
    """Bytes of the device that balloond may take in all. A GPU's may be left out: it is what is free before anything is
    given out, less the reserve."""
    reserve_bytes: int = Field(default=1 << 30, ge=0)
    """Bytes left to users that book nothing (the loader's CUDA context, the driver) when the capacity is left out."""
    kv_extent_bytes: int = Field(default=KV_EXTENT, gt=0)
    """Bytes of a KV extent to expect of engines on a GPU (`engines.kv_extent_bytes` of the gpu_schedulers): for the
    first spares, and to check that there are enough descriptors."""
    spare_bytes: int | None = Field(default=None, ge=0)
    """Bytes of the capacity that are kept in extents made ahead; by default 128 MiB of a GPU, nothing of host
    memory."""

    @field_validator("name")
    @classmethod
    def _has_a_backend(cls, name: str) -> str:
        try:
            backends.parse(name)
        except Invalid as error:
            raise ValueError(str(error)) from None
        return name

    @model_validator(mode="after")
    def _host_memory_has_a_size(self) -> Self:
        if self.capacity_bytes is None and not self.is_gpu:
            raise ValueError(f"{self.name} needs capacity_bytes; only a GPU's may be left out")
        return self

    @property
    def is_gpu(self) -> bool:
        return self.name.startswith("cuda:")

    @property
    def spares_budget(self) -> int:
        if self.spare_bytes is not None:
            return self.spare_bytes
        return _GPU_SPARE_BYTES if self.is_gpu else 0


class BalloondConfig(Config):
    """Settings of one node's balloond."""

    REMOVED: ClassVar[Mapping[str, str]] = {
        "shrink_timeout_s": f"a lowered limit has {_PATIENCE.shrink_s:g} s to free memory",
        "grow_timeout_s": f"a growth waits at most {_PATIENCE.grow_s:g} s",
    }

    node: str
    """Name of the node; no other node of a fleet has it."""
    handoff: SocketPath
    """Path of the SEQPACKET socket for engines and the loader."""
    keeper: SocketPath
    """Path of the keeper's socket."""
    devices: list[DeviceConfig]
    """Devices whose memory balloond gives out."""
    keeper_timeout_s: float = Field(default=10.0, gt=0)
    """Seconds that a start waits for the keeper."""
    reclaim_timeout_s: float = Field(default=_PATIENCE.reclaim_s, gt=0)
    """Seconds that an engine has to give back what a reclaim asks of it; what is missing then is not waited for."""

    @field_validator("devices")
    @classmethod
    def _names_differ(cls, devices: list[DeviceConfig]) -> list[DeviceConfig]:
        names = [device.name for device in devices]
        if not names or len(set(names)) < len(names):
            raise ValueError("at least one device, and no name twice")
        return devices

    @property
    def patience(self) -> ClaimPatience:
        return ClaimPatience(self.reclaim_timeout_s)
