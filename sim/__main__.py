"""`python -m sim --trace FILE --catalogue FILE --gpus N`: replays a trace on a simulated fleet."""

from __future__ import annotations

import argparse
import json
import sys
from math import inf
from pathlib import Path

from sim import report
from sim.arguments import group_sizes, setting
from sim.engines.cost import GPUS
from sim.inputs import catalogue, history, trace
from sim.policies import SYSTEMS
from sim.replay import Replay
from sim.system import FleetError


def _gpus(text: str) -> list[int]:
    if not text.isdecimal() or not int(text):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of GPUs")
    return [1] * int(text)


def _positive(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < inf:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number above zero")
    return value


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser("sim", description="Replays a trace on a simulated fleet.")
    parser.add_argument("--trace", type=Path, required=True, help="CSV: " + ",".join(trace.COLUMNS) + "; .gz too")
    parser.add_argument("--catalogue", type=Path, required=True, help="TOML: see sim/inputs/catalogue.py")
    fleet = parser.add_mutually_exclusive_group(required=True)
    fleet.add_argument("--gpus", type=_gpus, dest="sizes", help="GPUs, each a group of its own")
    fleet.add_argument("--groups", type=group_sizes, dest="sizes", help="groups by size: 24x1,2x4")
    parser.add_argument("--hardware", choices=sorted(GPUS), default="h200", help="(default: %(default)s)")
    parser.add_argument("--policy", choices=sorted(SYSTEMS), default="prism", help="(default: %(default)s)")
    parser.add_argument("--set", type=setting, action="append", default=[], metavar="NAME=VALUE", help="of the policy")
    parser.add_argument("--from-s", type=float, default=0.0, help="where in the trace the slice begins")
    parser.add_argument("--seconds", type=float, default=inf, help="how long it is (default: to the end)")
    parser.add_argument("--rate", type=float, default=1.0, help="requests for each of the trace (default: 1)")
    parser.add_argument(
        "--cold",
        action="store_true",
        help="placement begins without the traffic of the hour before the slice, which a trace has from 3600 s on",
    )
    parser.add_argument("--slo-scale", type=_positive, default=1.0, help="multiplies all targets (default: 1)")
    parser.add_argument("--seed", type=int, default=0, help="of the draw that --rate needs (default: 0)")
    parser.add_argument("--out", type=Path, help="the whole report, as JSON")
    return parser.parse_args(arguments)


def main() -> int:
    given = parse()
    try:
        models = catalogue.read(given.catalogue, given.slo_scale)
        part = trace.Slice(given.from_s, given.seconds, given.rate, given.seed)
        requests = trace.read(given.trace, models, part)
        system, settings = SYSTEMS[given.policy], dict(given.set)
        before = {} if given.cold else history.before(given.trace, models, part)
        hardware = GPUS[given.hardware]
        outcome = Replay(requests, models, given.sizes, system, settings, hardware, expected=before).run()
    except (catalogue.CatalogueError, trace.TraceError, FleetError, OSError) as error:
        print(f"sim: {error}", file=sys.stderr)
        return 2
    result = report.build(outcome)
    if given.out:
        arguments = {name: str(value) for name, value in vars(given).items() if name != "out"}
        given.out.write_text(json.dumps({"arguments": arguments, **result}, indent=1) + "\n")
    print(report.text(result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
