"""A trace over HTTP against a system that runs: ours, or any other with OpenAI's completions.

    python -m benchmarks.replay --url http://127.0.0.1:8000 --trace servegen48.csv.gz --models map.json --out FILE
        [--slos slos.json --slo-scale 2] [--from-s 39600 --seconds 240 --rate 0.5]
        [--shadow http://127.0.0.1:9000]        the same requests to a second system at the same time

Open loop: every request is sent when the trace says, whatever became of those before. A request's times count from
then, also where it was sent late; of a run whose 99th percentile of lateness is above --late-ms the figures are not
valid, which is said, written, and the exit status (3).

--models: a JSON object, from names of the trace, or patterns, to the served model: {"sg-large-*": "big", "*": "small"}.
The first that matches counts. Without it the names are the same. --slos: {"big": {"ttft_ms": 300, "tpot_ms": 20}}, both
times --slo-scale; a model that it lacks is best effort, whose requests miss only by failing. What is longer than the
server says that its model's context is, or --context-tokens, is clipped, and counted.

Prompts are random token ids of --ids (drawn by --seed for each request, so that no prefix is shared), or with --text as
many words, of which a tokenizer makes more or less tokens. Answers are as long as the trace says where the server knows
`ignore_eos`; those that were not are counted as `other_length`.
"""

from __future__ import annotations

import argparse
import json
import sys
from fnmatch import fnmatchcase
from math import inf
from pathlib import Path
from typing import Any

import uvloop

from benchmarks import _report
from benchmarks._replay import ReplayError, System, Wire, report, run, show
from sim.engines.cost import Shape
from sim.inputs import trace
from sim.inputs.catalogue import ModelSet, Spec

INVALID = 3
"""Exit status of a run that did not keep its schedule."""


def objects(path: Path | None) -> dict[str, Any]:
    """A JSON object. Raises ReplayError."""
    if path is None:
        return {}
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ReplayError(f"{path}: {error}") from None
    if not isinstance(found, dict):
        raise ReplayError(f"{path}: not a JSON object")
    return found


def target_s(slos: dict[str, Any], model: str, name: str, scale: float) -> float:
    """Of a served model; +inf: none."""
    value = slos.get(model, {}).get(name, inf)
    if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
        raise ReplayError(f"the {name} of {model} has to be a number above zero, not {value!r}")
    return scale * value / 1e3


def read(given: argparse.Namespace, served: dict[str, int | None]) -> trace.Workload:
    """The slice, with served models' names. Raises ReplayError, trace.TraceError, OSError."""
    names = objects(given.models) or {name: name for name in served}
    slos = objects(given.slos)
    for model in slos:
        if model not in served:
            raise ReplayError(f"{given.slos}: {model!r} is not served; there are {', '.join(sorted(served))}")
    entries = []
    for pattern, model in names.items():
        if model not in served:
            raise ReplayError(f"{given.models}: {model!r} is not served; there are {', '.join(sorted(served))}")
        ttft_s = target_s(slos, model, "ttft_ms", given.slo_scale)
        tpot_s = target_s(slos, model, "tpot_ms", given.slo_scale)
        context = min(served[model] or given.context_tokens, given.context_tokens)
        entries.append(Spec(pattern, Shape(0, 0), ttft_s, tpot_s, context))
    part = trace.Slice(given.from_s, given.seconds, given.rate, given.seed)
    replayed = trace.read(given.trace, ModelSet(entries), part)
    for request in replayed.requests:
        request.model = next(model for pattern, model in names.items() if fnmatchcase(request.model, pattern))
    return replayed


# --- the command line


def _ids(text: str) -> tuple[int, int]:
    low, _, high = text.partition(":")
    if not (low.isdecimal() and high.isdecimal() and int(low) < int(high)):
        raise argparse.ArgumentTypeError(f"{text!r} is not LOW:HIGH")
    return int(low), int(high)


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        "benchmarks.replay", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--url", required=True)
    parser.add_argument("--shadow", metavar="URL", help="a second system that gets the same requests")
    parser.add_argument("--trace", type=Path, required=True, help="CSV: " + ",".join(trace.COLUMNS) + "; .gz too")
    parser.add_argument("--models", type=Path, help="JSON: names of the trace to served models")
    parser.add_argument("--slos", type=Path, help="JSON: served models to their targets")
    parser.add_argument("--slo-scale", type=float, default=1.0)
    parser.add_argument("--from-s", type=float, default=0.0, help="where in the trace the slice begins")
    parser.add_argument("--seconds", type=float, default=inf, help="how long it is (default: to the end)")
    parser.add_argument("--rate", type=float, default=1.0, help="requests for each of the trace (default: 1)")
    parser.add_argument("--seed", type=int, default=0, help="of prompts and of the draw that --rate needs")
    parser.add_argument("--prompt-seed", type=int, help="of prompts, where it is another (default: --seed)")
    parser.add_argument("--context-tokens", type=int, default=1 << 20, help="longer requests are clipped to it")
    parser.add_argument(
        "--ids", type=_ids, default=(10, 1000), metavar="LOW:HIGH", help="prompts' token ids, below HIGH"
    )
    parser.add_argument("--text", action="store_true", help="prompts of words instead of token ids")
    parser.add_argument("--time-out-s", type=float, default=120.0, help="from when a request is due to its last token")
    parser.add_argument("--connections", type=int, default=4096, help="at most, to each system")
    parser.add_argument("--late-ms", type=float, default=50.0, help="how late the 99th percentile may be sent")
    parser.add_argument("--out", type=Path, required=True, help="JSON with raw samples")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> int:
    given = parse(arguments)
    systems = [System(url) for url in (given.url, given.shadow) if url]
    try:
        served = systems[0].contexts()
        for other in systems[1:]:
            served = {name: length for name, length in other.contexts().items() if name in served}
        for system in systems:
            # A copy for each: what becomes of a request is written into it.
            replayed = read(given, served)
            system.requests = replayed.requests
    except (ReplayError, trace.TraceError, OSError) as error:
        print(f"replay: {error}", file=sys.stderr)
        return 2
    print(f"{len(replayed.requests)} requests in {replayed.seconds:.0f} s, {replayed.clipped} clipped", flush=True)
    wire = Wire(given.seed if given.prompt_seed is None else given.prompt_seed, given.ids, given.text)
    uvloop.run(run(systems, wire, connections=given.connections, time_out_s=given.time_out_s))
    found = [report(system, replayed.seconds, given.late_ms) for system in systems]
    show(found)
    shown = {name: str(value) for name, value in vars(given).items() if name != "out" and value is not None}
    body = {"arguments": shown, "seconds": replayed.seconds, "clipped": replayed.clipped, "systems": found}
    _report.write(given.out, "replay", body | {"valid": all(each["valid"] for each in found)})
    for each in found:
        if not each["valid"]:
            print(
                f"replay: NOT VALID: requests to {each['url']} were sent up to {each['sent_late_s']['max']} s late, "
                f"{each['never_sent']} never; the schedule is what is replayed",
                file=sys.stderr,
            )
    return 0 if all(each["valid"] for each in found) else INVALID


if __name__ == "__main__":
    sys.exit(main())
