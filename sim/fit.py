"""Fits the cost model to measured figures, and prints how far it is off figures that it was not fitted to.

    python -m sim.fit --results benchmarks/results

The model is fitted to:

- starts of the 8B and 1B shapes (`gpu_residency_two_shapes`)
- what an engine measured of itself (`gpu_tensor_parallel`)
- decode steps of 8B by the number of requests in a running system (`decode_steps`), of 16 long streams (`gpu_reclaim`),
  of 1B in ten other runs (`decode_steps_compare`: the host), of two engines side by side in six
  (`decode_sharing_compare`)
- whole prefill steps of 1B, 3B and 8B in a running system (`prefill_steps_compare`)
- four GPUs that load at once (`gpu_load_group`)
- how much longer the first token of a lone 8B request takes than that of a 1B (`gpu_residency_two_shapes`: the launch
  of a layer), and than with prefill graphs (`gpu_residency_graphs`; cold starts and the way through a gateway too)
- one engine at 28 requests/s (`gpu_overhead_one_graphs`: TPOT, what else the host does in a step)
- an 8B engine that decodes beside one that prefills (`gpu_prefill_turn`: both)
- how much later the first step of a prompt is through beside engines that decode and do not stand still
  (`first_steps_compare`: what a gap costs)
- how far apart first tokens of prompts are that came to a 1B model at once
  (`compare_2gib/static-busy-6.graphs512`, from before larger graphs: what the host does before another step)

Requests of those loads do not go through the gateway; the rest of their way is fitted by the first load's TTFT, and is
no number of the model. The other figures that it prints were held out.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import ceil
from pathlib import Path
from statistics import fmean, median
from typing import Any

import numpy as np

from sim.clock import Clock
from sim.engines.cost import GB, H200, Cost, GpuModel, Shape
from sim.inputs.catalogue import SHAPES, Spec
from sim.inputs.request import SimulatedRequest
from sim.policies.static import Static
from sim.system import World

_PROMPT, _OUTPUT, _IN_FLIGHT = 256, 128, 256
"""Tokens of prompts and outputs, and requests in flight, in `benchmarks/gpu/overhead.py`."""
_WARM_UP_S, _SECONDS = 10.0, 60.0
_BURST = 4
"""Number of prompts of a burst whose first tokens are looked at: after the very last no other step is launched."""
_SHORT, _LONG = 16, 1024
"""Tokens of a step with graphs, and of one without."""
_STREAMS = 16
"""Number of streams in `benchmarks/gpu/reclaim.py`."""
_STEPS = "decode_steps_compare"
"""Results of ten other runs than those in `decode_steps`, with hosts as they are now."""
_SIDE_BY_SIDE = "decode_sharing_compare"
_PREFILL_STEPS = "prefill_steps_compare"
_FIRST_STEPS = "first_steps_compare"
_BIN, _LEAST_WINDOWS = 16, 4
"""Decode steps are grouped by so many numbers of requests, if a group has at least so many windows."""
_CHUNK_TOKENS = H200.prefill_chunk
_GRAPH_TOKENS = 512
"""Largest step in tokens with graphs in the results that this is fitted to, whatever the model."""


@dataclass(frozen=True)
class MeasuredLoad:
    """Means over a load."""

    ttft_s: float
    tpot_s: float
    tokens_per_s: float


@dataclass(frozen=True)
class FittedLine:
    """One comparison of a measured figure with the model's."""

    what: str
    measured: float
    modelled: float
    fitted: bool

    @property
    def error(self) -> float:
        return self.modelled / self.measured - 1


def simulate(hardware: GpuModel, engines: int, rate: float | None, path_s: float = 0.0) -> MeasuredLoad:
    """The load of `overhead.py` on so many 8B engines of one GPU, without a gateway; `path_s`: seconds of what is left
    of the way. `rate`: requests per second; None: always `_IN_FLIGHT` requests."""
    clock, draw = Clock(), random.Random(1)
    specs = [Spec(f"engine-{i}", SHAPES["8b"], context_tokens=4096) for i in range(engines)]
    done: list[SimulatedRequest] = []
    numbers = iter(range(1 << 30))

    def submit(output: int = _OUTPUT) -> None:
        number = next(numbers)
        system.submit(SimulatedRequest(str(number), specs[number % engines].name, clock.now, _PROMPT, output))

    def ended(request: SimulatedRequest) -> None:
        done.append(request)
        if rate is None:
            clock.after(0.0, submit)

    system = Static(World(clock, hardware, [1], specs, {}), ended)
    if rate is None:
        # The first requests have uneven lengths, so that they do not end together.
        for number in range(_IN_FLIGHT):
            clock.at(0.0, submit, max(2, _OUTPUT * (number + 1) // _IN_FLIGHT))
    else:
        at = 0.0
        while at < _SECONDS:
            at += draw.expovariate(rate)
            clock.at(at, submit)
    clock.run(_SECONDS)
    counted = [request for request in done if request.ended_at > _WARM_UP_S]
    return MeasuredLoad(
        fmean(request.ttft for request in counted) + path_s,
        fmean(request.tpot for request in counted),
        len(counted) * _OUTPUT / (_SECONDS - _WARM_UP_S),
    )


def solve(f: Callable[[float], float], low: float, high: float) -> float:
    """Argument at which the rising `f` is zero, to a thousandth of the interval."""
    for _ in range(10):
        middle = (low + high) / 2
        low, high = (low, middle) if f(middle) > 0 else (middle, high)
    return (low + high) / 2


class Results:
    """The result files of a folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def read(self, name: str) -> Any:
        return json.loads((self._folder / f"{name}.json").read_text())

    def load(self, part: str, load: str) -> MeasuredLoad:
        """Means over all windows of Prism's side."""
        windows = [
            window
            for window in self.read(f"gpu_overhead_{part}_graphs")["windows"]
            if window["load"] == load and window["side"] == "elastic"
        ]
        return MeasuredLoad(
            fmean(s for window in windows for s in window["ttft_s"]),
            fmean(s for window in windows for s in window["tpot_s"]),
            sum(window["tokens"] for window in windows) / sum(window["seconds"] for window in windows),
        )


def wake_s(rows: dict[str, Any]) -> float:
    """Seconds of a wake-up, all its steps together."""
    return median(sum(steps.values()) for steps in rows["steps"])


def lone_s(rows: dict[str, Any]) -> float:
    """TTFT in seconds of a lone short request."""
    return median(rows["warm_s"])


def burst_step_s(results: Results, shape: str, chunk: int) -> float:
    """Seconds between the ends of whole prefill steps, where many prompts came at once to one model and nothing else
    ran."""
    (system,) = (found := results.read("compare_2gib/static-busy-6.graphs512"))["systems"]
    rows = [row for row in system["samples"]["rows"] if row[4] is not None]
    spans = [(at, at + ttft_s + (output - 1) * (tpot_s or 0.0)) for at, _, _, output, ttft_s, tpot_s, _ in rows]
    bursts: dict[tuple[float, str, int], list[float]] = {}
    for at, model, prompt, _, ttft_s, *_ in rows:
        if found["system"]["shapes"][model] == shape:
            bursts.setdefault((at, model, prompt), []).append(ttft_s)
    steps = []
    for (at, _, prompt), firsts in bursts.items():
        alone = sum(begin <= at + max(firsts) and end >= at for begin, end in spans) == len(firsts)
        if alone and len(firsts) > _BURST and prompt > chunk / 2:
            ends = sorted(firsts)
            between = ceil(_BURST * prompt / chunk) - ceil(prompt / chunk)
            steps.append((ends[_BURST - 1] - ends[0]) / between)
    return median(steps)


def whole_steps_s(results: Results, shape: str) -> float:
    """Median seconds of an engine's whole prefill steps one after the other, with graphs as engines have them, in a
    running system that leaves it the GPU."""
    return float(results.read(_PREFILL_STEPS)["shapes"][shape]["p50_s"])


def bursts_step_s(results: Results, shape: str) -> float:
    """Seconds of a whole prefill step on a host that has nothing else to do."""
    return float(results.read(f"gpu_bursts_{shape}")["cases"]["{}"]["beside"]["nothing"]["step_s"])


def prefill_token(results: Results, hardware: GpuModel) -> tuple[float, float]:
    """Seconds for each byte of weights, and for each layer, of each token: the best fit through whole steps of three
    shapes, all weighted alike."""
    table, steps = [], []
    none = replace(hardware, prefill_s_per_token_byte=0.0, prefill_s_per_token_layer=0.0)
    for name in ("1b", "3b", "8b"):
        shape, step_s = SHAPES[name], whole_steps_s(results, name)
        rest_s = step_s - Cost(shape, none).prefill_part(_CHUNK_TOKENS, 0)
        table.append((shape.weights_bytes / GB / step_s, shape.layers / step_s))
        steps.append(rest_s / step_s)
    (byte, layer), *_ = np.linalg.lstsq(np.array(table), np.array(steps))
    return float(byte) / GB / _CHUNK_TOKENS, float(layer) / _CHUNK_TOKENS


def decode_host(results: Results) -> tuple[float, float]:
    """Seconds of a decode step and for each of its requests, on hosts in a running system that decode for a 1B model
    alone on its GPU, whose devices are faster. Steps longer than twice the median waited for something, and are left
    out."""
    windows = [each for each in results.read(_STEPS)["windows"] if each["shape"] == "1b"]
    middle = median(each["step_s"] for each in windows)
    rows = [(1.0, each["requests"], each["step_s"]) for each in windows if each["step_s"] < 2 * middle]
    (step, request), *_ = np.linalg.lstsq(np.array([row[:2] for row in rows]), np.array([row[2] for row in rows]))
    return float(step), float(request)


def side_by_side(results: Results, hardware: GpuModel, engines: int) -> float:
    """Share of a GPU that so many engines use together, the median of all windows."""
    windows = (window["engines"] for window in results.read(_SIDE_BY_SIDE)["windows"])
    return median(together(window, hardware) for window in windows if len(window) == engines)


def together(engines: Sequence[dict[str, Any]], hardware: GpuModel) -> float:
    """Share of a GPU that engines which decode on it at the same time use together: the sum of the devices' seconds for
    a step over the step's own."""
    return sum(device_s(each, hardware) / each["step_s"] for each in engines)


def device_s(engine: dict[str, Any], hardware: GpuModel) -> float:
    """Seconds of the devices for an engine's step."""
    shape = SHAPES[engine["shape"]]
    context = int(engine["kv_bytes"] / shape.kv_bytes_per_token)
    return Cost(shape, hardware).decode_devices(1, max(1, round(engine["requests"])), context)


def beside_prefill(results: Results, hardware: GpuModel) -> tuple[float, float]:
    """For an 8B engine that decodes beside one that prefills, each with half of the device: what the model gives for
    the step and for the prefill, as a multiple of what was measured."""
    turn, eight = results.read("gpu_prefill_turn"), Cost(SHAPES["8b"], hardware)
    beside, prompt = turn["sides"]["neither"], int(turn["arguments"]["prompt"])
    step_s = 2 / hardware.sharing * eight.decode(1, _STREAMS, 100 * _STREAMS)
    prefill_s = 2 / hardware.sharing * eight.prefill(eight.prefill_part(prompt, 0), prompt)
    return step_s / beside["between_tokens_s"]["beside"]["p50"], prefill_s * beside["prefilled_tokens_per_s"] / prompt


def batches(results: Results, shape: str, name: str = "decode_steps") -> list[tuple[float, float, float]]:
    """(requests, bytes of KV, seconds of a step): medians of windows with about as many requests."""
    bins: dict[int, list[Any]] = {}
    for window in results.read(name)["windows"]:
        if window["shape"] == shape:
            bins.setdefault(int(window["requests"]) // _BIN, []).append(window)
    keys = ("requests", "kv_bytes", "step_s")
    enough = [some for _, some in sorted(bins.items()) if len(some) >= _LEAST_WINDOWS]
    return [
        (of["requests"], of["kv_bytes"], of["step_s"])
        for of in ({key: median(window[key] for window in some) for key in keys} for some in enough)
    ]


def plane(points: Sequence[tuple[float, float, float]]) -> tuple[float, float, float]:
    """The plane through such points: seconds of a step, seconds for each request, and seconds for each byte of KV."""
    table = np.array([(1.0, requests, kv_bytes / 1e9) for requests, kv_bytes, _ in points])
    (fixed, each, kv), *_ = np.linalg.lstsq(table, np.array([step_s for *_, step_s in points]))
    return float(fixed), float(each), float(kv) / 1e9


def lone_prefill_s(shape: Shape, hardware: GpuModel, tokens: int) -> float:
    """Seconds of prefill of a request of 16 tokens, in a step that counts as one of `tokens`."""
    cost = Cost(shape, _as_measured(hardware))
    return cost.prefill(cost.prefill_part(16, 0), tokens)


def _as_measured(hardware: GpuModel) -> GpuModel:
    return replace(hardware, prefill_graph_tokens=_GRAPH_TOKENS)


def _between_s(shape: Shape, hardware: GpuModel) -> float:
    """Seconds between the ends of prefill steps of prompts that come at once, simulated."""
    clock = Clock()
    spec = Spec("m", shape, context_tokens=2 * _CHUNK_TOKENS)
    hardware = replace(_as_measured(hardware), path_s=0.0)
    firsts: list[float] = []
    world = World(clock, hardware, [1], [spec], {})
    static = Static(world, lambda request: firsts.append(request.first_at))
    for number in range(2 * _BURST):
        static.submit(SimulatedRequest(str(number), "m", 0.0, _CHUNK_TOKENS, 1))
    clock.run()
    return (firsts[_BURST - 1] - firsts[0]) / (_BURST - 1)


def later_beside_s(results: Results) -> dict[str, float]:
    """Shape -> seconds by which the first prefill step of an idle engine is through later beside one that decodes for
    many requests (median)."""
    shapes = results.read(_FIRST_STEPS)["shapes"]
    return {shape: kinds["many"]["p50_s"] - kinds["alone"]["p50_s"] for shape, kinds in shapes.items()}


def modelled_later_s(shape: str, hardware: GpuModel) -> float:
    """Seconds by which the cost model has that step later: a slice behind each piece, and for all of it every other
    one."""
    cost = Cost(SHAPES[shape], hardware)
    part = cost.prefill_part(_SHORT, 0)
    return cost.prefill_gaps(part, _SHORT) + cost.prefill_devices(part)


def fit(results: Results) -> GpuModel:
    eight, one = SHAPES["8b"], SHAPES["1b"]
    shapes = results.read("gpu_residency_two_shapes")
    slow, fast = wake_s(shapes["8b"]), wake_s(shapes["1b"])
    link = (eight.weights_bytes - one.weights_bytes) / (slow - fast)
    wake_base = fast - one.weights_bytes / link
    # Cold starts capture graphs of every layer, those for prefill too. The first start of a process compiles as well.
    graphs = results.read("gpu_residency_graphs")["8b"]
    cold = {name: min(shapes[name]["cold_s"]) - SHAPES[name].weights_bytes / link for name in ("8b", "1b")}
    cold_8b = fmean(graphs["cold_s"]) - lone_s(graphs) - eight.weights_bytes / link
    cold_layer = (cold["8b"] - cold["1b"]) / (eight.layers - one.layers) + (cold_8b - cold["8b"]) / eight.layers

    group = results.read("gpu_load_group")["rows"][0]

    # Decode steps: batches of 8B, among them 16 requests with much KV, and one request of 1B.
    reclaim = results.read("gpu_reclaim")
    tensor = results.read("gpu_tensor_parallel")["measured"]
    much = (_STREAMS, reclaim["stats"]["steady"]["kv_used_bytes"], reclaim["between_tokens_s"]["after"]["p50"])
    eight_s, request_s, kv_s = plane([*batches(results, "8b"), much])
    one_s = tensor["ours-on-one"]["decode_step_ms"] / 1e3
    # That engine's embeddings were not tied: what it loaded is what it measured.
    one_bytes = tensor["ours-on-one"]["weights_bytes"]
    ratio = eight.layers / one.layers
    weight_rate = (eight.weights_bytes - ratio * one_bytes) / (eight_s - ratio * one_s)
    step_layer = (one_s - one_bytes / weight_rate) / one.layers

    hardware = replace(
        H200,
        link_bytes_per_s=link,
        host_bytes_per_s=group["bytes"] / median(group["seconds"]),
        wake_base_s=wake_base,
        cold_base_s=cold_8b - eight.layers * cold_layer,
        cold_layer_s=cold_layer,
        weight_bytes_per_s=weight_rate,
        step_layer_s=step_layer,
        kv_bytes_per_s=1 / kv_s,
        request_s_per_byte=request_s / eight.weights_bytes,
        path_s=0.0,
    )
    each, each_layer = prefill_token(results, hardware)
    host_s, host_request_s = decode_host(results)
    layer = (lone_s(shapes["8b"]) - lone_s(shapes["1b"])) / (eight.layers - one.layers)
    hardware = replace(
        hardware,
        decode_host_s=host_s,
        decode_host_request_s=host_request_s,
        decode_sharing=side_by_side(results, hardware, 2),
        prefill_step_s=0.0,
        prefill_s_per_token_byte=each,
        prefill_s_per_token_layer=each_layer,
        prefill_layer_s=layer,
        prefill_graph_layer_s=layer - (lone_s(shapes["8b"]) - lone_s(graphs)) / eight.layers,
    )

    def with_host(host_s: float) -> GpuModel:
        return replace(hardware, prefill_host_s=host_s)

    target = results.load("one", "28").tpot_s
    hardware = with_host(solve(lambda s: simulate(with_host(s), 1, 28.0).tpot_s - target, 0.0, 0.02))
    between = burst_step_s(results, "1b", _CHUNK_TOKENS)
    host = Cost(one, _as_measured(hardware)).prefill_host(_CHUNK_TOKENS)
    hardware = replace(hardware, prefill_after_s=between - host)
    shared = fmean(beside_prefill(results, replace(hardware, sharing=1.0)))
    path = lone_s(graphs) - lone_prefill_s(eight, hardware, _SHORT)
    hardware = replace(hardware, sharing=shared, path_s=max(0.0, path))
    later = later_beside_s(results)

    def off_s(gap_layer_s: float) -> float:
        gaps = replace(hardware, prefill_gap_layer_s=gap_layer_s)
        return fmean(modelled_later_s(shape, gaps) - later_s for shape, later_s in later.items())

    return replace(hardware, prefill_gap_layer_s=solve(off_s, 0.0, 0.01))


def compare(results: Results, hardware: GpuModel) -> list[FittedLine]:
    lines: list[FittedLine] = []

    def line(what: str, measured: float, modelled: float, fitted: bool = False) -> None:
        lines.append(FittedLine(what, measured, modelled, fitted))

    direct_s = results.load("one", "28").ttft_s - simulate(hardware, 1, 28.0).ttft_s
    for part, engines, load in (
        ("one", 1, "28"),
        ("one", 1, "32"),
        ("one", 1, "full"),
        ("two", 2, "28"),
        ("two", 2, "32"),
        ("two", 2, "full"),
    ):
        told = results.load(part, load)
        found = simulate(hardware, engines, None if load == "full" else float(load), direct_s)
        name = f"{part}, {load}"
        line(f"{name}: mean TTFT, s", told.ttft_s, found.ttft_s, name == "one, 28")
        line(f"{name}: mean TPOT, s", told.tpot_s, found.tpot_s, name == "one, 28")
        line(f"{name}: tokens/s", told.tokens_per_s, found.tokens_per_s)
    eight, one = Cost(SHAPES["8b"], hardware), Cost(SHAPES["1b"], hardware)
    shapes, again = results.read("gpu_residency_two_shapes"), results.read("gpu_residency")
    warm = {name: hardware.path_s + lone_prefill_s(SHAPES[name], hardware, _LONG) for name in ("8b", "1b")}
    for name, modelled in warm.items():
        line(f"TTFT of a lone {name.upper()} request without prefill graphs, s", lone_s(shapes[name]), modelled, True)
    graphs = results.read("gpu_residency_graphs")["8b"]
    modelled = hardware.path_s + lone_prefill_s(SHAPES["8b"], hardware, _SHORT)
    line("TTFT of a lone 8B request, s", lone_s(graphs), modelled, True)
    more_s = lone_s(shapes["8b"]) - lone_s(shapes["1b"])
    line("8B's longer than 1B's by, s", more_s, warm["8b"] - warm["1b"], True)
    line("wake 8B, s", wake_s(shapes["8b"]), eight.wake_s, True)
    line("wake 1B, s", wake_s(shapes["1b"]), one.wake_s, True)
    line("wake 8B, 100 cycles on another host, s", wake_s(again["8b"]), eight.wake_s)
    line("cold 8B with prefill graphs, s", fmean(graphs["cold_s"]), eight.cold_s + hardware.path_s, True)
    turn = results.read("gpu_prefill_turn")
    line(
        "step of 16 short streams, s",
        turn["sides"]["neither"]["between_tokens_s"]["alone"]["p50"],
        eight.decode(1, 16, 1600),
    )
    for shape, fitted in (("8b", True), ("3b", False), ("1b", False)):
        for requests, kv_bytes, step_s in batches(results, shape):
            context = int(kv_bytes / SHAPES[shape].kv_bytes_per_token)
            modelled = Cost(SHAPES[shape], hardware).decode(1, round(requests), context)
            line(f"step of {requests:.0f} requests in a running system, {shape.upper()}, s", step_s, modelled, fitted)
    for shape, fitted in (("8b", False), ("3b", False), ("1b", True)):
        for requests, kv_bytes, step_s in batches(results, shape, _STEPS):
            context = int(kv_bytes / SHAPES[shape].kv_bytes_per_token)
            modelled = Cost(SHAPES[shape], hardware).decode(1, round(requests), context)
            line(f"step of {requests:.0f} requests in ten other runs, {shape.upper()}, s", step_s, modelled, fitted)
    for shape in ("8b", "3b"):
        for row in results.read(f"gpu_batches_{shape}")["rows"]:
            if (row["side"], row["draw"]) == ("elastic", "greedy"):
                context = int(row["batch"] * row["context_tokens"])
                modelled = Cost(SHAPES[shape], hardware).decode(1, row["batch"], context)
                line(f"step of {row['batch']} requests and nothing else, {shape.upper()}, s", row["step_s"], modelled)
    for engines, fitted in ((2, True), (3, False)):
        what = f"{engines} engines that decode side by side, of one's pace"
        line(what, side_by_side(results, hardware, engines), hardware.decode_sharing, fitted)
    step, prefill = beside_prefill(results, hardware)
    line("step beside a prefill, of what is measured", 1.0, step, True)
    line("prefill beside decodes, of what is measured", 1.0, prefill, True)
    for shape, later_s in later_beside_s(results).items():
        what = f"first prefill step of {shape.upper()} beside decodes for many, later by, s"
        line(what, later_s, modelled_later_s(shape, hardware), True)
    for shape in ("8b", "3b", "1b"):
        cost = Cost(SHAPES[shape], hardware)
        modelled = cost.prefill(cost.prefill_part(_CHUNK_TOKENS, 0), _CHUNK_TOKENS)
        what = f"whole prefill step, {shape.upper()}"
        line(f"{what}, in a running system, s", whole_steps_s(results, shape), modelled, True)
        line(f"{what}, and nothing else, s", bursts_step_s(results, shape), modelled)
    rates = [each["prefill_tokens_per_s"] for each in results.read("gpu_reclaim")["measured"].values()]
    line("prefill that engines measure of themselves, 8B, tokens/s", fmean(rates), eight.prefill_tokens_per_s)
    bursts = burst_step_s(results, "1b", _CHUNK_TOKENS)
    line("between steps of prompts that come at once, 1B, s", bursts, _between_s(SHAPES["1b"], hardware), True)
    group = results.read("gpu_load_group")["rows"][0]
    four = Cost(Shape(SHAPES["70b"].weights_bytes, SHAPES["70b"].kv_bytes_per_token, 4), hardware)
    line("70B onto four GPUs, s", median(group["seconds"]), four.wake_s - hardware.wake_base_s, True)
    return lines


def main() -> None:
    parser = argparse.ArgumentParser("sim.fit", description="Fits the cost model to measured figures.")
    parser.add_argument("--results", type=Path, required=True, help="the folder of the GPU benchmarks' JSON files")
    parser.add_argument("--keep", action="store_true", help="do not fit: compare the numbers of sim/engines/cost.py")
    given = parser.parse_args()
    results = Results(given.results)
    if not given.results.is_dir():
        parser.error(f"{given.results} is no folder")
    hardware = H200 if given.keep else fit(results)
    for name in GpuModel.__slots__:
        if getattr(hardware, name) != getattr(H200, name):
            print(f"{name} = {getattr(hardware, name):.5g}")
    lines = compare(results, hardware)
    for line in lines:
        print(
            f"{line.what:55} {line.measured:10.4g} {line.modelled:10.4g} {line.error:+7.1%}{'  fitted' * line.fitted}"
        )
    held_out = [abs(line.error) for line in lines if not line.fitted]
    print(f"held out: mean error {fmean(held_out):.1%}, median {median(held_out):.1%}, worst {max(held_out):.1%}")


if __name__ == "__main__":
    main()
