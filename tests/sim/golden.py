"""Simulated results of fixed seeds, to the digit: what no change that leaves behaviour as it is may move.

python -m tests.sim.golden          compares, and says what differs
python -m tests.sim.golden --write  writes `golden.json` anew, for a change that is meant to change behaviour
"""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import hashlib
import json
import pkgutil
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any
from unittest import mock

from sim import report
from sim.engines.cost import GPUS
from sim.group.node import SimulatedGroup, SimulatedResidency, SimulatedResident
from sim.inputs import catalogue, trace
from sim.policies import SYSTEMS
from sim.replay import Replay
from sim.synthetic import LongTail, shapes, write

FILE = Path(__file__).with_name("golden.json")
SEEDS = (1, 2, 3)
FLEETS = {
    "prism": ("prism", 2, SEEDS),
    "prism_short": ("prism", 1, (2,)),
    "least_slack": ("least_slack", 2, SEEDS),
    "serverlessllm": ("serverlessllm", 2, SEEDS),
    "qlm": ("qlm", 2, SEEDS),
    "muxserve": ("muxserve", 4, SEEDS),
    "static": ("static", 4, SEEDS),
}
"""System, GPUs and seeds by name: few enough GPUs that models make way for each other, as many as the fixed places of
two systems need. "prism_short" has too little memory: requests are retracted, models wait for room."""
RUNS = [(name, seed) for name, (_, _, seeds) in FLEETS.items() for seed in seeds]
POLICIES = {
    "admission": "gpu_scheduler.policy.queue.admission.admit",
    "activation": "placement.policy.lifecycle.group_index.GroupIndex.activate",
    "kv_pressure": "placement.policy.lifecycle.group_index.GroupIndex.relieve",
    "moves": "sim.cluster.fleet.rebalance",
    "reclaims": "balloond.policy.balloon.plan",
}
"""Functions that decide, by the name of their policy: all of their answers in a run are digested."""
_FIRST = 40
"""Decisions of a run that are kept as text, for people who look for the first difference."""


def tail(seed: int) -> LongTail:
    """The fleet of a seed: 13 models that take turns in bursts, about 700 requests in a minute."""
    kinds = shapes("1b=3,3b=3,8b=4,14b=1")
    return LongTail(models=13, rate=9.0, seconds=60.0, kinds=kinds, busy=0.4, burst_s=15.0, seed=seed)


def plain(value: Any) -> Any:
    """The value without names of types, which may change: dataclasses as lists of their fields, enums as their
    values."""
    if isinstance(value, enum.Enum):
        return plain(value.value)
    if dataclasses.is_dataclass(value):
        return [plain(getattr(value, field.name)) for field in dataclasses.fields(value)]
    if isinstance(value, Mapping):
        return sorted((str(key), plain(each)) for key, each in value.items())
    if isinstance(value, (set, frozenset)):
        return sorted(map(repr, map(plain, value)))
    if isinstance(value, (list, tuple)):
        return [plain(each) for each in value]
    return value


@contextlib.contextmanager
def answers() -> Iterator[dict[str, list[str]]]:
    """What each policy answers inside the block, in order."""
    told: dict[str, list[str]] = {policy: [] for policy in POLICIES}

    def recorded(policy: str, decide: Any) -> Any:
        def decided(*given: Any, **named: Any) -> Any:
            answer = decide(*given, **named)
            told[policy].append(repr(plain(answer)))
            return answer

        return decided

    with contextlib.ExitStack() as stack:
        for policy, where in POLICIES.items():
            stack.enter_context(mock.patch(where, recorded(policy, pkgutil.resolve_name(where))))
        yield told


def run(name: str, seed: int) -> dict[str, Any]:
    """The report of one replay without its timings, and every change of residency: a digest and the first ones."""
    decisions: list[str] = []
    change = SimulatedGroup._set

    def recorded(group: SimulatedGroup, resident: SimulatedResident, residency: SimulatedResidency) -> None:
        decisions.append(f"{group.clock.now!r} {group.name} {resident.spec.name} {residency.name}")
        change(group, resident, residency)

    with (
        answers() as told,
        tempfile.TemporaryDirectory() as folder,
        mock.patch.object(SimulatedGroup, "_set", recorded),
    ):
        files = Path(folder) / "trace.csv", Path(folder) / "models.toml"
        write(tail(seed), *files)
        models = catalogue.read(files[1], 1.0)
        requests = trace.read(files[0], models, trace.Slice())
        system, gpus, _ = FLEETS[name]
        fleet, build = [1] * gpus, SYSTEMS[system]
        outcome = Replay(requests, models, fleet, build, {}, GPUS["h100"], progress=lambda line: None).run()
    built = report.build(outcome)
    events = built.pop("run")["events"]
    times = [f"{r.model} {r.arrival!r} {r.ttft!r} {r.tpot!r}" for r in outcome.trace.requests]
    return {
        "events": events,
        "all": built["all"],
        "counts": built["counts"],
        "report": _digest([json.dumps(built, sort_keys=True)]),
        "requests": _digest(times),
        "decisions": _digest(decisions),
        "policies": {policy: [len(each), _digest(each)] for policy, each in told.items()},
        "first_decisions": decisions[:_FIRST],
    }


def differences(found: Any, kept: Any, where: str = "") -> Iterator[str]:
    """What is not equal, a line each: the place, the value found and the value kept."""
    if isinstance(found, dict) and isinstance(kept, dict):
        for key in sorted(found.keys() | kept.keys()):
            yield from differences(found.get(key), kept.get(key), f"{where}/{key}")
    elif isinstance(found, list) and isinstance(kept, list):
        for i in range(max(len(found), len(kept))):
            pair = (each[i] if i < len(each) else None for each in (found, kept))
            yield from differences(*pair, f"{where}/{i}")
    elif found != kept:
        yield f"{where}: {found!r} instead of {kept!r}"


def _digest(lines: list[str]) -> str:
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]


def main() -> int:
    found = {f"{name} {seed}": run(name, seed) for name, seed in RUNS}
    if "--write" in sys.argv[1:]:
        FILE.write_text(json.dumps(found, indent=1) + "\n")
        return 0
    told = list(differences(found, json.loads(FILE.read_text())))
    print("\n".join(told) or "no difference")
    return bool(told)


if __name__ == "__main__":
    sys.exit(main())
