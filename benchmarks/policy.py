"""What the pure policies cost on one core.

    python benchmarks/policy.py                     # all, about a minute
    python benchmarks/policy.py --only arbitration  # or: placement

arbitration: a shared queue with 10,000 waiting requests of 24 models, at different loads (work that waits / time until
the last deadline).

    schedule     Moore-Hodgson on a list of jobs in any order, sorting included
    late         Moore-Hodgson alone, on lists that are in order: what a queue that keeps itself sorted pays
    plan         the whole run of the queue: costs anew, time-outs, Moore-Hodgson, room, the second queue in order
    event        one event of the dispatcher: a request arrives, plan, admission, the first one starts

placement: Algorithm 1 for 10,000 models on 10,000 devices.

    place        nothing is placed yet
    settled      everything is where a run just put it, demands as they were
    shifted      the same with demands that changed, which is where models move
    packed       as many models as fill small devices: by demand some find no place, first-fit-decreasing decides
    activate     one group is heard, then one model comes up (`standing`), all others busy
    evict        the same on devices that are full of idle models

All of it for a tenth and three tenths of the sizes too, so that the growth shows.

Groups of one device, and groups of eight with tensor-parallel models among the others. Times are on the clock, and on
the core: what the policy used; the difference is other work on the machine. Workloads are drawn from a fixed seed.
"""

from __future__ import annotations

import argparse
import gc
import os
import random
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import count, cycle
from math import inf
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"  # one core is the question
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np

from benchmarks import _report
from gpu_scheduler.policy.queue.admission import AdmissionMemory, ModelKv, PrefillLimits, admit
from gpu_scheduler.policy.queue.backlog import Backlog
from gpu_scheduler.policy.queue.decisions import Start
from gpu_scheduler.policy.queue.moore_hodgson import Job, late_indices, schedule
from gpu_scheduler.policy.queue.slack import PrefillSpeed, WaitingRequest
from kv_kinds.layout import of_tokens
from placement.config import PlacementConfig
from placement.policy import kvpr
from placement.policy.assignment.assign import Assignment, Candidate, assign
from placement.policy.kvpr import Device, Group, Model
from placement.policy.lifecycle.decisions import PlacedModel
from placement.policy.lifecycle.group_index import index_groups

SEED = 20260731
LOAD_WEIGHT: float = PlacementConfig.model_fields["load_weight"].default
GIB = 1 << 30
MODELS = 24
LOADS = (0.5, 1.0, 2.0, 10.0)
ARBITRATION_AIM_MS = 5.0
PLACEMENT_AIM_S = 1.0
ACTIVATE_AIM_MS = 10.0
SHARES = (0.1, 0.3, 1.0)
"""Of the sizes asked for: how costs grow."""


def sample(run: Callable[[], Any], runs: int, scale: float) -> dict[str, list[float]]:
    """`runs` calls after one to warm up: time on the clock, and on the core. Other work on a shared machine shows in
    the first only. Garbage is collected before, not while, it is measured."""
    run()
    gc.collect()
    gc.disable()
    wall, core = [], []
    for _ in range(runs):
        begin, begin_core = time.perf_counter(), time.thread_time()
        run()
        wall.append(scale * (time.perf_counter() - begin))
        core.append(scale * (time.thread_time() - begin_core))
    gc.enable()
    return {"samples": wall, "core_samples": core}


# --- arbitration ------------------------------------------------------------------------------------------------------


def requests(n: int, load: float) -> list[WaitingRequest]:
    """Prompts of a few hundred tokens with a long tail, TTFT targets spread so that `load` times the time until the
    last deadline is waiting; one in ten is best effort."""
    draw = random.Random(SEED)
    prompts = [min(32_768, max(1, round(draw.lognormvariate(6.0, 1.2)))) for _ in range(n)]
    span = sum(prompts) / 25_000 / load
    made = []
    for i, tokens in enumerate(prompts):
        deadline = inf if i % 10 == 0 else draw.uniform(0.0, span)
        arrival = min(0.0, deadline - draw.choice([0.5, 2.0, 5.0]))
        made.append(WaitingRequest(f"request-{i}", f"model-{draw.randrange(MODELS)}", arrival, deadline, tokens))
    return made


def filled(waiting: list[WaitingRequest]) -> Backlog:
    """A queue whose models are active, but for two that wake."""
    queue = Backlog()
    for i in range(MODELS):
        speed = PrefillSpeed(25_000.0)
        speed.observe(512, 512 / 20_000)
        queue.add_model(f"model-{i}", speed)
        if i < 2:
            queue.model_waking(f"model-{i}", 0.3 + i)
        else:
            queue.model_active(f"model-{i}")
    for request in waiting:
        queue.add(request, 0.0)
    return queue


def arbitration(n: int, runs: int) -> Iterator[dict[str, Any]]:
    memory = AdmissionMemory({f"model-{i}": ModelKv(1 << 50, 0, kv=of_tokens(GIB >> 13)) for i in range(MODELS)})
    for load in LOADS:
        waiting = requests(n, load)
        jobs = [Job(r.request_id, r.deadline, r.prompt_tokens / 25_000) for r in waiting]
        ordered = sorted(jobs, key=lambda job: job.deadline)
        deadlines, costs = np.array([job.deadline for job in ordered]), np.array([job.cost for job in ordered])
        late = len(late_indices(deadlines, costs, 0.0))
        queue = filled(waiting)

        event = _Event(queue, waiting, memory)
        work: dict[str, Callable[[], Any]] = {
            "schedule": lambda jobs=jobs: schedule(jobs, 0.0),
            "late": lambda deadlines=deadlines, costs=costs: late_indices(deadlines, costs, 0.0),
            "plan": lambda queue=queue: queue.plan(0.0),
            "event": event,
        }
        for name, run in work.items():
            yield {"what": name, "load": load, "waiting": n, "late": late, "unit": "ms", **sample(run, runs, 1e3)}


class _Event:
    """A request arrives, the queue plans, the first that may start does. One in, one out."""

    def __init__(self, queue: Backlog, waiting: list[WaitingRequest], memory: AdmissionMemory) -> None:
        self._queue = queue
        self._next = cycle(waiting)
        self._number = count()
        self._memory = memory
        self._limits = PrefillLimits()

    def __call__(self) -> None:
        facts = next(self._next)
        queue = self._queue
        queue.add(replace(facts, request_id=f"new-{next(self._number)}"), 0.0)
        queue_plan = queue.plan(0.0)
        for decision in admit(queue_plan, queue, self._memory, self._limits):
            if isinstance(decision, Start):
                queue.start(decision, 0.0)
                queue.finish(decision.request_id, 0.0)
                break


# --- placement --------------------------------------------------------------------------------------------------------


def cluster(devices: int, size: int, capacity: int = 141 * GIB) -> list[Group]:
    load = kvpr.load(LOAD_WEIGHT, capacity)
    return [
        Group(f"group-{g}", tuple(Device(f"gpu-{g}-{d}", capacity, load) for d in range(size)))
        for g in range(devices // size)
    ]


def models(n: int, parts: tuple[int, ...]) -> list[Model]:
    """Weights of 1B to 70B models, demands over five orders of magnitude."""
    draw = random.Random(SEED)
    sizes = ((2, 1), (6, 1), (15, 1), (28, 1), (60, 2), (130, 4))
    made = []
    for i in range(n):
        weights, least = draw.choice(sizes if parts != (1,) else sizes[:4])
        wide = max(least, draw.choice(parts))
        made.append(Model(f"model-{i}", draw.lognormvariate(15.0, 2.5), weights * GIB, wide * GIB, wide * GIB, wide))
    return made


def shifted(assignment: Assignment, made: list[Model]) -> list[Candidate]:
    draw = random.Random(SEED + 1)
    return [
        Candidate(
            Model(m.name, m.demand * draw.lognormvariate(0.0, 1.5), m.weights, m.floor, m.quota, m.parts),
            assignment.places.get(m.name),
        )
        for m in made
    ]


def placement(n: int, runs: int) -> Iterator[dict[str, Any]]:
    for title, size, parts in (("groups of 1", 1, (1,)), ("groups of 8, tensor parallel", 8, (1, 1, 1, 2, 4, 8))):
        groups, made = cluster(n, size), models(n, parts)
        fresh = [Candidate(model) for model in made]
        placed = assign(groups, fresh, 0.0)
        settled = [Candidate(model, placed.places.get(model.name)) for model in made]
        yield from _placements("place", title, groups, fresh, runs)
        yield from _placements("settled", title, groups, settled, runs)
        moved = shifted(placed, made)
        yield from _placements("shifted", title, groups, moved, runs)
        yield _activate(title, groups, placed, made, 0.0)
    groups, made = cluster(n, 1), models(6 * n, (1,))
    full = assign(groups, [Candidate(model) for model in made], 0.0)
    yield _activate("groups of 1, full", groups, full, made, 60.0)
    groups, made = cluster(n, 1, 32 * GIB), models(2 * n, (1,))
    tight = made[: _fill(made, n * 32 * GIB, 0.97)]
    yield from _placements("packed", "groups of 1, small", groups, [Candidate(model) for model in tight], runs)


def _activate(title: str, groups: list[Group], placed: Assignment, made: list[Model], idle_s: float) -> dict[str, Any]:
    places = placed.places
    residents = [PlacedModel(model, places[model.name], idle_s=idle_s) for model in made if model.name in places]
    there = index_groups(groups, residents)
    by_name = {group.name: group for group in groups}
    on: dict[str, list[PlacedModel]] = {}
    for resident in residents:
        on.setdefault(resident.place.group, []).append(resident)
    following = cycle(zip(cycle(sorted(on)), models(200, (len(groups[0].devices),)), strict=False))

    def activate() -> None:
        heard, model = next(following)
        there.hear(by_name[heard], on[heard])
        there.activate(replace(model, name="new"))

    devices = sum(len(group.devices) for group in groups)
    what = "activate" if idle_s == 0 else "evict"
    case = {"what": what, "cluster": title, "models": len(residents), "devices": devices, "unit": "ms"}
    return {**case, **sample(activate, 200, 1e3)}


def _fill(made: list[Model], capacity: int, share: float) -> int:
    """How many of the models take `share` of the capacity."""
    total = 0
    for i, model in enumerate(made):
        total += model.needed
        if total > share * capacity:
            return i
    return len(made)


def _placements(
    what: str, title: str, groups: list[Group], candidates: list[Candidate], runs: int
) -> Iterator[dict[str, Any]]:
    outcome = assign(groups, candidates, 0.0)
    kinds = Counter(reason.kind.value for reason in outcome.reasons.values())
    devices = sum(len(group.devices) for group in groups)
    yield {
        "what": what,
        "cluster": title,
        "models": len(candidates),
        "devices": devices,
        "outcome": dict(kinds),
        "unit": "s",
        **sample(lambda: assign(groups, candidates, 0.0), runs, 1.0),
    }


# --- the program ------------------------------------------------------------------------------------------------------


def main() -> None:
    assert __doc__
    parser = _report.arguments("policy", __doc__)
    parser.add_argument("--only", choices=("arbitration", "placement"), help="one half")
    parser.add_argument(
        "--waiting", type=_positive, default=10_000, help="requests in the queue (default: %(default)s)"
    )
    parser.add_argument("--models", type=_positive, default=10_000, help="models, and devices (default: %(default)s)")
    parser.add_argument(
        "--runs", type=_positive, default=200, help="samples of each arbitration (default: %(default)s)"
    )
    parser.add_argument(
        "--placements", type=_positive, default=5, help="samples of each placement (default: %(default)s)"
    )
    arguments = parser.parse_args()

    results: list[dict[str, Any]] = []
    if arguments.only != "placement":
        for share in SHARES:
            results += arbitration(round(share * arguments.waiting), arguments.runs)
    if arguments.only != "arbitration":
        for share in SHARES:
            results += placement(round(share * arguments.models), arguments.placements)
    rows = []
    for result in results:
        result["wall"], result["core"] = _report.spread(result["samples"]), _report.spread(result["core_samples"])
        case = (
            f"{result['waiting']} wait, load {result['load']:g}, {result['late']} late"
            if "load" in result
            else _cluster(result)
        )
        wall, core = result["wall"], result["core"]
        rows.append([result["what"], case, wall["p50"], wall["p99"], core["p50"], core["p99"], result["unit"]])
    _report.table(("what", "case", "p50", "p99", "core p50", "core p99", "unit"), rows)
    aims = {"arbitration_ms": ARBITRATION_AIM_MS, "placement_s": PLACEMENT_AIM_S, "activate_ms": ACTIVATE_AIM_MS}
    _report.write(arguments.out, "policy", {"aims": aims, "results": results})


def _cluster(result: dict[str, Any]) -> str:
    return f"{result['models']} models on {result['devices']} devices, {result['cluster']}"


def _positive(text: str) -> int:
    number = int(text)
    if number <= 0:
        raise argparse.ArgumentTypeError(f"{text} is not above zero")
    return number


if __name__ == "__main__":
    main()
