"""The systems that are compared on the real stack, each as settings of our services: which models have a place for
good, what their memory is, and what the shared queue goes by. Prism is the services with their defaults; its ablations
lack one part each. All have the same engines, CUDA graphs, weight images and warm pool.

static       a device's models share its memory by plan, each with a limit that stays; first come, first served
muxserve     MuxServe++ without its scheduler: places by plan, KV memory shared on demand, nobody leaves or moves; first
             come, first served, each engine for itself. (Its authors' has one prefill at a time, the models in turn:
             `sim/policies/muxserve.py` has both, and says what the turns are worth.)
serverlessllm
             a model has a device for itself while it serves; another's comes when that is idle, and hibernates in
             between as Prism's do, which its authors' system does not. It waits for a device as long as all are busy;
             its authors' choice among servers (the nearest checkpoint) is none where one node has all images
prism        everything
no-...       without rebalancing, in planned places; in order of arrival, without turn and pace; with decodes that share
             the devices; the first with fixed limits as well (a part of the memory is one of a place); with engines
             given up instead of hibernating

The plan is that of the simulator's static partition (`placement/policy/assignment/partition.py`), from the rates of the
slice.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import inf
from pathlib import Path
from typing import Any

from loader.checkpoints import checkpoint
from loader.policy.floor import floor_bytes
from placement.policy import kvpr
from placement.policy.assignment.partition import Part, partition
from sim.inputs.request import SimulatedRequest

DEFAULT_TPOT_S = 0.1
_BY_ARRIVAL = {
    "experiments": {"order": "arrival", "prefill_turn": False, "protect_decodes": False},
    "prefill_priority_ms": 0.0,
    "decode_arbitration_ms": 0.0,
}


def flat(arbitration: Mapping[str, Any]) -> dict[str, str]:
    """Settings of arbitration in the form of the simulator's `--set`: names without sections, values as text."""
    named = {**arbitration, **arbitration.get("experiments", {})}
    return {name: str(value).lower() for name, value in named.items() if name != "experiments"}


@dataclass(frozen=True)
class System:
    """Settings, by service."""

    planned: bool = False
    """Every model has the plan's place."""
    stays: bool = False
    """Nobody is ever evicted."""
    divided: bool = False
    """Every model has the plan's part of the memory, and never more."""
    arbitration: Mapping[str, Any] = field(default_factory=dict)
    placement: Mapping[str, Any] = field(default_factory=dict)
    alone: bool = False
    """A device has one model at a time: they warm up one after the other."""


SYSTEMS = {
    "static": System(planned=True, stays=True, divided=True, arbitration=_BY_ARRIVAL),
    "muxserve": System(planned=True, stays=True, arbitration=_BY_ARRIVAL),
    "serverlessllm": System(
        arbitration=_BY_ARRIVAL,
        placement={
            "rebalance": False,
            "exclusive": True,
            "idle_s": 0.0,
            "stay": 0.0,
            "patience_s": inf,
            "relieve": False,
        },
        alone=True,
    ),
    "prism": System(),
    "no-placement": System(planned=True),
    "no-arbitration": System(arbitration=_BY_ARRIVAL),
    "no-decode-turn": System(arbitration={"decode_arbitration_ms": 0.0}),
    "no-ballooning": System(planned=True, divided=True, placement={"relieve": False}),
    "no-hibernation": System(placement={"hibernate": False}),
}


@dataclass(frozen=True)
class Sizes:
    """What a device holds beside KV, as the services book it."""

    dtype_bytes: int
    weights_extent_bytes: int
    kv_extent_bytes: int
    quota_bytes: int
    """Of each engine, as the catalogue states it."""
    set_aside_bytes: int
    """What balloond keeps of each device: a plan that fills it to the last byte would not come up."""


GPU = Sizes(2, 32 << 20, 8 << 20, 1664 << 20, 130 << 20)
"""The quota: engines measured 1.33 to 1.61 GiB. Until 26 November 2026 it was 2 GiB here, which those pay for whose
models all stay awake (docs/lab/gpu-runs.md)."""
CPU = Sizes(4, 512 << 10, 256 << 10, 1 << 20, 0)


@dataclass(frozen=True)
class Model:
    """One that is served."""

    name: str
    folder: Path
    context_tokens: int
    graph_bytes: int = 0
    """Of its engine's CUDA graphs, at most: for the plan, which knows of no engine that has measured them."""


def _up(amount: int, step: int) -> int:
    return -(-amount // step) * step


def plan(
    models: Sequence[Model],
    requests: Sequence[SimulatedRequest],
    seconds: float,
    devices: Mapping[str, int],
    sizes: Sizes,
) -> dict[str, Part]:
    """Where each model is, and its KV, for these requests in so many seconds. Raises ValueError for models that find
    no room."""
    tokens: dict[str, int] = {}
    targets: dict[str, float] = {}
    for request in requests:
        tokens[request.model] = tokens.get(request.model, 0) + request.prompt_tokens + request.output_tokens
        targets[request.model] = request.tpot_s
    wanted = []
    for model in models:
        found = checkpoint.read(model.folder, sizes.dtype_bytes)
        target = targets.get(model.name, inf)
        rate = tokens.get(model.name, 0) / seconds
        wanted.append(
            kvpr.Model(
                model.name,
                kvpr.demand(rate, found.kv.demand_bytes, target if target < inf else None, DEFAULT_TPOT_S),
                _up(found.weights_bytes, sizes.weights_extent_bytes) + model.graph_bytes,
                floor_bytes(model.context_tokens, 0, found.kv, sizes.kv_extent_bytes),
                sizes.quota_bytes,
            )
        )
    left = {name: capacity - sizes.set_aside_bytes for name, capacity in devices.items()}
    groups = [kvpr.Group(name, (kvpr.Device(name, capacity),)) for name, capacity in left.items()]
    parts = partition(groups, wanted)
    if homeless := [model.name for model in models if model.name not in parts]:
        raise ValueError(f"no room for {', '.join(homeless)} on {devices}")
    return parts


def listed(
    system: System, models: Sequence[Model], parts: Mapping[str, Part], sizes: Sizes
) -> dict[str, dict[str, Any]]:
    """Entries of the catalogue."""
    entries = {}
    for model in models:
        entry: dict[str, Any] = {
            "path": str(model.folder),
            "context_tokens": model.context_tokens,
            "quota_bytes": sizes.quota_bytes,
            "pinned": system.stays,
        }
        if system.divided:
            kv_bytes = parts[model.name].kv_bytes // sizes.kv_extent_bytes * sizes.kv_extent_bytes
            per_token = checkpoint.read(model.folder, sizes.dtype_bytes).kv_bytes_per_token
            entry["floor_tokens"] = max(model.context_tokens, kv_bytes // per_token)
        entries[model.name] = entry
    return entries


def local(system: System, parts: Mapping[str, Part]) -> dict[str, Any]:
    """Of `deploy.local.topology.Local`."""
    placement = dict(system.placement)
    if system.planned:
        places = {name: part.place.group for name, part in parts.items()}
        placement = {**placement, "rebalance": False, "places": places}
    return {
        "placement": placement,
        "arbitration": dict(system.arbitration),
        "gpu_scheduler": {"elastic_kv": not system.divided},
    }
