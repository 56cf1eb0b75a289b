"""The bodies and parameters of admins' requests."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Literal

import pydantic
from pydantic import Field

from gateway.openai import bodies
from protos import common_pb2

LONGEST_WAIT_S = 600.0
_Milliseconds = Annotated[int, Field(ge=0, lt=10**9)]
_Tokens = Annotated[int, Field(ge=0, lt=1 << 31)]
_DOWN = {"hibernating": common_pb2.HIBERNATING, "cold": common_pb2.COLD, "disk": common_pb2.ON_DISK}


class ModelEntry(pydantic.BaseModel):
    """A model to add: the keys of an entry of the catalogue. Their meaning, and what else holds for their values, is
    the loader's (`loader/catalogue/catalogue.py`)."""

    model_config = pydantic.ConfigDict(extra="forbid", strict=True, protected_namespaces=())

    name: str = Field(min_length=1)
    path: str = Field(min_length=1)
    ttft_ms: _Milliseconds = 0
    tpot_ms: _Milliseconds = 0
    pinned: bool = False
    engine: Literal["", "sglang", "echo"] = ""
    devices: Literal[1, 2, 4] = 1
    most_replicas: int = Field(0, ge=0, lt=1 << 31)
    quota_bytes: int | None = Field(None, ge=0, lt=1 << 48)
    context_tokens: _Tokens = 0
    floor_tokens: _Tokens = 0
    tool_parser: str = ""
    reasoning_parser: str = ""
    task: Literal["", "generate", "embed", "rerank"] = ""
    kv_dtype: Literal["", "fp8"] = ""
    unverified: bool = False
    aliases: list[str] = []
    base: str = ""

    def listing(self) -> common_pb2.ModelListing:
        """The entry as placement takes it."""
        targets = {"ttft_ms", "tpot_ms"}
        slo = common_pb2.Slo(**self.model_dump(include=targets))
        return common_pb2.ModelListing(**self.model_dump(exclude=targets), default_slo=slo)


class WaitParameters(pydantic.BaseModel):
    """How long an answer waits."""

    model_config = pydantic.ConfigDict(extra="forbid")

    wait_s: float = Field(60.0, ge=0, le=LONGEST_WAIT_S, allow_inf_nan=False)
    """Seconds until the answer is that the change is under way; 0: it is that at once."""


class SleepParameters(WaitParameters):
    """How far down a model goes."""

    to: Literal["hibernating", "cold", "disk"] = "hibernating"
    group: str = ""
    """The group that it leaves, of several that serve it; empty: all."""

    @property
    def below(self) -> list[common_pb2.Residency]:
        """Residencies of a model that is down as far as that."""
        order = list(_DOWN)
        return [_DOWN[each] for each in order[order.index(self.to) :]]

    @property
    def target(self) -> common_pb2.Residency:
        return _DOWN[self.to]


class MoveParameters(WaitParameters):
    """Where a model goes."""

    to: str = Field(min_length=1)
    """A group."""


class ReplicaParameters(WaitParameters):
    """Where a model comes up beside the groups that serve it."""

    to: str = ""
    """A group; empty: placement chooses."""


class RemovalParameters(WaitParameters):
    """What is removed."""

    force: bool = False
    """Whether also a model that is pinned or has requests."""


def query(kind: type[bodies.M], parameters: Mapping[str, str]) -> bodies.M:
    """The checked parameters of a URL. Raises BadField that names the first wrong one."""
    return bodies.made(kind, dict(parameters))
