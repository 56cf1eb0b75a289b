"""Configuration of balloond."""

from __future__ import annotations

from pydantic import Field, field_validator

from balloond.policy.claims import Patience
from services.config import Config, Section

_PATIENCE = Patience()


class DeviceConfig(Section):
    """A device of this node."""

    name: str
    """"cpu:0": the part before the colon names the backend."""
    capacity_bytes: int = Field(gt=0)
    """What balloond may give out and book, all in all."""


class BalloondConfig(Config):
    """One node."""

    node: str
    handoff: str
    """Path of the SEQPACKET socket for engines and the loader."""
    keeper: str
    """Path of the keeper's socket."""
    devices: list[DeviceConfig]
    keeper_timeout_s: float = Field(default=10.0, gt=0)
    """How long a start waits for the keeper."""
    reclaim_timeout_s: float = Field(default=_PATIENCE.reclaim_s, gt=0)
    shrink_timeout_s: float = Field(default=_PATIENCE.shrink_s, gt=0)
    grow_timeout_s: float = Field(default=_PATIENCE.grow_s, gt=0)

    @field_validator("devices")
    @classmethod
    def _names_differ(cls, devices: list[DeviceConfig]) -> list[DeviceConfig]:
        names = [device.name for device in devices]
        if not names or len(set(names)) < len(names):
            raise ValueError("at least one device, and no name twice")
        return devices

    @property
    def patience(self) -> Patience:
        return Patience(self.reclaim_timeout_s, self.shrink_timeout_s, self.grow_timeout_s)
