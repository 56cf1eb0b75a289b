"""How far placement is from the optimum, on thousands of small clusters, tight ones too.

    python benchmarks/placement_optimum.py                  # 500 instances of each family, some ten minutes
    python benchmarks/placement_optimum.py --instances 50

For each family of instances (`testing/optimum.py`), for Algorithm 1 with first-fit-decreasing alone and with local
search behind it: the largest pressure over the least that any placement has (mean, p99, worst), and the share of the
instances, all of which have a placement, for which none was found. Every 25th optimum is proved by HiGHS.

Then the paper's bound at tau = 0, on equal devices and models of one part: the bound over what Algorithm 1 came to.

Then a constant load on clusters of several groups: models are where other demands had them, and placement runs every
ten seconds with tau, a cool-down of a minute and one move at a time, finishing what was begun or deciding all anew
after each move: how many moves, and how many clusters never come to rest.
"""

from __future__ import annotations

import random
import sys
import time
from itertools import product
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import _report
from placement.policy.assignment.assign import AssignRules, Candidate, assign
from testing.optimum import FAMILIES, Undecided, draw_instance, exists_below, largest_pressure, optimum
from testing.placements import LOOSE, bound, elsewhere, still_moves

SEED = 20260731
STEPS = (0, AssignRules().improve_steps)
PROVE_EVERY = 25


def distances(number: int) -> list[dict[str, Any]]:
    found = []
    for family in FAMILIES:
        draw = random.Random(SEED)
        ratios: dict[int, list[float]] = {steps: [] for steps in STEPS}
        without = dict.fromkeys(STEPS, 0)
        undecided = proved = 0
        for k in range(number):
            instance = draw_instance(family, draw)
            reached = {}
            for steps in STEPS:
                rules = AssignRules(improve_steps=steps)
                places = assign(instance.groups, [Candidate(model) for model in instance.models], 0.0, rules).places
                reached[steps] = largest_pressure(instance, places)
            try:
                best = optimum(instance, min((p for p in reached.values() if p is not None), default=None))
                if k % PROVE_EVERY == 0:
                    assert not exists_below(instance, best), "the optimum is none"
                    proved += 1
            except Undecided:
                undecided += 1
                continue
            for steps, pressure in reached.items():
                if pressure is None:
                    without[steps] += 1
                else:
                    ratios[steps].append(float(pressure / best))
        for steps in STEPS:
            found.append(
                {
                    "family": family.name,
                    "steps": steps,
                    "instances": number,
                    "undecided": undecided,
                    "proved": proved,
                    "without_place": without[steps],
                    "ratios": [round(ratio, 5) for ratio in ratios[steps]],
                }
            )
    return found


def bounds(number: int) -> dict[str, Any]:
    draw = random.Random(SEED)
    looseness, ratios, broken = [], [], 0
    for _ in range(number):
        instance = draw_instance(LOOSE, draw)
        got = bound(instance, "after")
        if got is None:
            continue
        reached, factor = got
        best = optimum(instance, reached)
        assert best is not None
        broken += reached > best * factor
        looseness.append(float(best * factor / reached))
        ratios.append(float(reached / best))
    return {"instances": len(ratios), "broken": broken, "bound_over_reached": looseness, "reached_over_optimum": ratios}


def loads(number: int) -> list[dict[str, Any]]:
    found = []
    for family in FAMILIES:
        if family.groups[1] == 1:
            continue
        for tau, finish in product((0.0, 0.2), (False, True)):
            draw = random.Random(SEED)
            clusters = moves = restless = 0
            for _ in range(number):
                instance = draw_instance(family, draw)
                places = elsewhere(instance, draw)
                if len(places) < len(instance.models) or len(instance.groups) < 2:
                    continue
                made, still, _ = still_moves(instance, places, tau, finish=finish)
                clusters, moves, restless = clusters + 1, moves + made, restless + still
            counted = {"clusters": clusters, "moves": moves, "restless": restless}
            found.append({"family": family.name, "tau": tau, "finish": finish, **counted})
    return found


def main() -> None:
    assert __doc__
    parser = _report.arguments("placement_optimum", __doc__)
    parser.add_argument("--instances", type=int, default=500, help="of each family (default: %(default)s)")
    parser.add_argument("--loads", type=int, default=100, help="clusters of each family under a constant load")
    arguments = parser.parse_args()

    begin = time.perf_counter()
    against = distances(arguments.instances)
    rows = []
    for one in against:
        ratios = sorted(one["ratios"])
        share = one["without_place"] / max(1, one["instances"] - one["undecided"])
        one |= {
            "mean": sum(ratios) / len(ratios),
            "p99": _report.quantile(ratios, 0.99),
            "worst": ratios[-1],
            "without_place_share": share,
        }
        case = "with local search" if one["steps"] else "Algorithm 1 alone"
        rows.append(
            [
                one["family"],
                case,
                one["mean"],
                one["p99"],
                one["worst"],
                f"{share:.1%}",
                one["proved"],
                one["undecided"],
            ]
        )
    header = ("family", "placement", "mean", "p99", "worst", "without a place", "proved", "undecided")
    _report.table(header, rows)

    paper = bounds(arguments.instances)
    for name in ("bound_over_reached", "reached_over_optimum"):
        print(name, _report.spread(paper[name]))
    print(f"the bound does not hold in {paper['broken']} of {paper['instances']} instances")

    constant = loads(arguments.loads)
    _report.table(tuple(constant[0]), [list(one.values()) for one in constant])
    print(f"{time.perf_counter() - begin:.0f} s")
    _report.write(
        arguments.out, "placement_optimum", {"against_optimum": against, "bound": paper, "constant_load": constant}
    )


if __name__ == "__main__":
    main()
