"""Growth and return of KV memory in small extents, between one process that makes extents and two that map them.

Question: at 2, 4 and 8 MiB, how fast does a model grow and give back, what does one extent cost and in which call,
how long from asking to mapped, does the driver let two processes do it at once, does a neighbour's kernels slow it
(or it them), and does every byte come back?

    python -m benchmarks.gpu.extent_handoff --out DIR --commit HASH
"""

from __future__ import annotations

import multiprocessing
import socket
import time
from typing import Any

from benchmarks.gpu import report
from benchmarks.gpu.extent_peers import run_engine, run_maker


class Bench:
    """The processes, and one method a question."""

    def __init__(self, device: int) -> None:
        spawn = multiprocessing.get_context("spawn")
        ends = [socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET) for _ in range(3)]
        self._pipes: dict[str, Any] = {}
        self._processes = []
        roles: dict[str, tuple[Any, tuple[Any, ...]]] = {
            "maker": (run_maker, ([mine for mine, _ in ends],)),
            "a": (run_engine, (ends[0][1], True)),
            "b": (run_engine, (ends[1][1], False)),
            "neighbour": (run_engine, (ends[2][1], True)),
        }
        for name, (body, arguments) in roles.items():
            here, there = spawn.Pipe()
            process = spawn.Process(target=body, args=(device, there, *arguments), name=name)
            process.start()
            self._pipes[name] = here
            self._processes.append(process)
        for mine, theirs in ends:
            mine.close()
            theirs.close()
        for pipe in self._pipes.values():
            pipe.recv()

    def ask(self, who: str, *command: Any) -> Any:
        self._pipes[who].send(command)
        return self._answer(who)

    def _answer(self, who: str) -> Any:
        if not self._pipes[who].poll(60):
            raise TimeoutError(f"{who} did not answer")
        return self._pipes[who].recv()

    def together(self, **commands: tuple[Any, ...]) -> dict[str, Any]:
        """Let several processes work at the same time."""
        for who, command in commands.items():
            self._pipes[who].send(command)
        return {who: self._answer(who) for who in commands}

    def close(self) -> None:
        for pipe in self._pipes.values():
            pipe.send(None)
        for process in self._processes:
            process.join(20)
            if process.is_alive():
                process.terminate()


class Conservation:
    """Free memory as the driver and as nvidia-smi see it, compared with the beginning after each phase."""

    def __init__(self, device: int) -> None:
        from benchmarks.gpu import vmm

        vmm.make_current(device)
        self._free = vmm.free_bytes
        self.readings: list[dict[str, Any]] = []
        self.read("start")

    def read(self, after: str) -> None:
        self.readings.append({"after": after, "free_bytes": self._free(), "smi_used_mib": report.smi("memory.used")})

    @property
    def exact(self) -> bool:
        first = self.readings[0]
        return all(
            r["free_bytes"] == first["free_bytes"] and r["smi_used_mib"] == first["smi_used_mib"] for r in self.readings
        )


def _rate(result: dict[str, Any], nbytes: int) -> float:
    return result["extents"] * nbytes / result["seconds"] / 1e9


def _per_extent(calls: dict[str, list[tuple[float, int]]], extents: int) -> dict[str, float]:
    return {name: round(sum(us for us, _ in sums) / extents, 2) for name, sums in calls.items()}


def throughput(bench: Bench, held: Conservation, size_mib: int, gib: float, batch: int) -> list[dict[str, Any]]:
    """Grow and give back: alone, two at once, against each other, beside a busy neighbour, under own kernels."""
    nbytes = size_mib << 20
    count = int(gib * 1024 / size_mib)
    phases: list[dict[str, Any]] = []

    def phase(name: str, results: dict[str, Any], **extra: Any) -> None:
        maker = bench.ask("maker", "calls")
        entry: dict[str, Any] = {"phase": name, "size_mib": size_mib, "batch": batch, **extra}
        for who, result in results.items():
            result["gb_per_s"] = round(_rate(result, nbytes), 2)
            result["us_per_extent"] = _per_extent(result["calls"], result["extents"])
            entry[who] = result
        entry["maker_calls"] = maker
        phases.append(entry)

    grow, back = ("grow", count, nbytes, batch), ("give_back", count, batch)
    phase("grow, alone", {"a": bench.ask("a", *grow)})
    phase("return, alone", {"a": bench.ask("a", *back)})
    held.read(f"{size_mib} MiB alone")
    bench.ask("maker", "prepare", count, nbytes)
    bench.ask("maker", "calls")
    phase("grow from spares, alone", {"a": bench.ask("a", *grow)})
    bench.ask("a", "dirty")
    phase("a returns, b grows", bench.together(a=back, b=grow))
    stale = bench.ask("b", "nonzero")
    phases[-1]["nonzero_words_seen_by_b"] = stale
    phase("return, alone", {"b": bench.ask("b", *back)})
    held.read(f"{size_mib} MiB exchange")
    phase("grow, two at once", bench.together(a=grow, b=grow))
    phase("return, two at once", bench.together(a=back, b=back))
    held.read(f"{size_mib} MiB two at once")
    bench.ask("maker", "prepare", 2 * count, nbytes)
    bench.ask("maker", "calls")
    phase("grow from spares, two at once", bench.together(a=grow, b=grow))
    phase("return, two at once", bench.together(a=back, b=back))

    bench.ask("neighbour", "start")
    phase("grow, neighbour decodes", {"a": bench.ask("a", *grow)})
    phase("a returns, b grows, neighbour decodes", bench.together(a=back, b=grow))
    phase("return, neighbour decodes", {"b": bench.ask("b", *back)})
    phases[-1]["neighbour_step_ms"] = bench.ask("neighbour", "stop")
    held.read(f"{size_mib} MiB neighbour")

    bench.ask("a", "enqueue", 400)
    phase("grow, own kernels queued", {"a": bench.ask("a", *grow)}, still_busy=bench.ask("a", "still_busy"))
    phase("return, own kernels queued", {"a": bench.ask("a", *back)}, still_busy=bench.ask("a", "still_busy"))
    bench.ask("a", "drain")
    held.read(f"{size_mib} MiB own kernels")
    return phases


def latencies(bench: Bench, size_mib: int, iterations: int) -> list[dict[str, Any]]:
    """One extent, from asking to mapped and from unmapping to acknowledged."""
    nbytes = size_mib << 20
    entries: list[dict[str, Any]] = []

    def entry(name: str, results: dict[str, Any]) -> None:
        maker = bench.ask("maker", "calls").get(0, {})
        for who, result in results.items():
            entries.append({"case": name, "who": who, "size_mib": size_mib, **result})
            if who == "a":
                entries[-1]["maker_us"] = {call: [round(us, 1) for us, _ in each] for call, each in maker.items()}

    command = ("latency", iterations, nbytes)
    bench.ask("a", "latency", 20, nbytes)
    bench.ask("maker", "calls")
    entry("made on demand", {"a": bench.ask("a", *command)})
    bench.ask("maker", "hold", 1, nbytes)
    entry("made on demand, one held beside", {"a": bench.ask("a", *command)})
    bench.ask("maker", "hold", 63, nbytes)
    entry("made on demand, 64 held beside", {"a": bench.ask("a", *command)})
    bench.ask("maker", "drop")
    bench.ask("b", "hold_descriptor", nbytes)
    bench.ask("maker", "close_own")
    entry("made on demand, one descriptor in another process", {"a": bench.ask("a", *command)})
    bench.ask("b", "drop_descriptor")
    bench.ask("maker", "prepare", iterations, nbytes)
    entry("from spares", {"a": bench.ask("a", *command)})
    entry("made on demand, two at once", bench.together(a=command, b=command))
    bench.ask("maker", "prepare", 2 * iterations, nbytes)
    entry("from spares, two at once", bench.together(a=command, b=command))
    bench.ask("neighbour", "start")
    entry("made on demand, neighbour decodes", {"a": bench.ask("a", *command)})
    bench.ask("maker", "prepare", iterations, nbytes)
    entry("from spares, neighbour decodes", {"a": bench.ask("a", *command)})
    bench.ask("neighbour", "stop")
    bench.ask("a", "enqueue", 400)
    bench.ask("maker", "prepare", iterations, nbytes)
    entry("from spares, own kernels queued", {"a": bench.ask("a", *command)})
    bench.ask("a", "drain")
    return entries


def at_scale(bench: Bench, held: Conservation, gib: int) -> dict[str, Any]:
    """A large part of the device in 2 MiB extents: does an extent cost more when there are many?"""
    nbytes, count = 2 << 20, gib * 512
    grown = bench.ask("a", "grow", count, nbytes, 253)
    descriptors = bench.ask("maker", "held")
    given = bench.ask("a", "give_back", count, 253)
    held.read(f"{gib} GiB in 2 MiB")
    maker = bench.ask("maker", "calls")[0]
    return {"gib": gib, "descriptors_held": descriptors, "grow": grown, "give_back": given, "maker_calls": maker}


def batches(bench: Bench, gib: float) -> list[dict[str, Any]]:
    """How many extents should one message carry?"""
    nbytes, count = 2 << 20, int(gib * 512)
    entries = []
    for batch in (1, 4, 16, 64, 253):
        grown = bench.ask("a", "grow", count, nbytes, batch)
        given = bench.ask("a", "give_back", count, batch)
        entries.append({"batch": batch, "grow_gb_per_s": _rate(grown, nbytes), "return_gb_per_s": _rate(given, nbytes)})
    bench.ask("maker", "calls")
    return entries


def _print(result: dict[str, Any]) -> None:
    rows = []
    for phase in result["phases"]:
        for who in ("a", "b"):
            if who in phase:
                split = " ".join(f"{k} {v}" for k, v in phase[who]["us_per_extent"].items())
                rows.append((phase["size_mib"], phase["phase"], who, phase[who]["gb_per_s"], split))
    report.table("growth and return", ("MiB", "phase", "who", "GB/s", "us per extent, by call"), rows)
    rows = []
    for phase in result["phases"]:
        if phase["phase"] not in ("grow, alone", "return, alone", "grow, two at once", "return, two at once"):
            continue
        for peer, calls in phase["maker_calls"].items():
            for name, sums in calls.items():
                total, n = sum(us for us, _ in sums), sum(c for _, c in sums)
                rows.append((phase["size_mib"], phase["phase"], peer, name, n, total / n))
    report.table("the maker's calls", ("MiB", "phase", "for", "call", "calls", "us each"), rows)
    rows = [
        (
            e["size_mib"],
            e["case"],
            e["who"],
            *(report.spread(e[k])[q] for k in ("mapped_us", "returned_us") for q in ("p50", "p99")),
        )
        for e in result["latencies"]
    ]
    report.table("one extent", ("MiB", "case", "who", "mapped p50 us", "p99", "returned p50 us", "p99"), rows)
    rows = []
    for e in result["latencies"]:
        for name, samples in e.get("maker_us", {}).items():
            each = report.spread(samples)
            rows.append((e["size_mib"], e["case"], name, each["p50"], each["p99"]))
    report.table("one extent: the maker's calls", ("MiB", "case", "call", "p50 us", "p99"), rows)
    rows = [("alone", *report.spread(result["neighbour_alone_ms"]).values())]
    for phase in result["phases"]:
        if "neighbour_step_ms" in phase:
            rows.append((f"beside {phase['size_mib']} MiB growth", *report.spread(phase["neighbour_step_ms"]).values()))
    report.table("the neighbour's decode step, ms", ("when", "p50", "p90", "p99", "max", "steps"), rows)
    report.table(
        "extents a message (2 MiB)",
        ("batch", "grow GB/s", "return GB/s"),
        [(e["batch"], e["grow_gb_per_s"], e["return_gb_per_s"]) for e in result["batches"]],
    )
    scale, rows = result["scale"], []
    for where, calls in (
        ("engine", scale["grow"]["calls"]),
        ("engine", scale["give_back"]["calls"]),
        ("maker", scale["maker_calls"]),
    ):
        for name, sums in calls.items():
            tenth = max(1, len(sums) // 10)
            ends = [sum(us for us, _ in part) / sum(c for _, c in part) for part in (sums[:tenth], sums[-tenth:])]
            rows.append((where, name, *ends))
    report.table(
        f"{scale['gib']} GiB in 2 MiB extents: us a call", ("where", "call", "first tenth", "last tenth"), rows
    )
    print(
        "descriptors held:",
        scale["descriptors_held"],
        "of",
        result["descriptor_limit"],
        "| every byte came back:",
        result["conserved"],
        flush=True,
    )


def main() -> None:
    parser = report.arguments(__doc__.splitlines()[0])
    parser.add_argument("--gib", type=float, default=4.0, help="GiB that each process grows by in a phase")
    parser.add_argument("--sizes", type=int, nargs="+", default=[2, 4, 8], help="MiB of one extent")
    parser.add_argument("--batch", type=int, default=64, help="extents asked for in one message")
    parser.add_argument("--iterations", type=int, default=400, help="extents measured one by one in each case")
    parser.add_argument("--scale-gib", type=int, default=48)
    arguments = parser.parse_args()
    bench = Bench(arguments.device)
    try:
        # Once through everything that loads kernels or grows an allocator, so that memory is compared with a settled
        # state.
        warm_up = int(arguments.gib * 512)
        for who, use in (("a", "dirty"), ("b", "nonzero")):
            bench.ask(who, "grow", warm_up, 2 << 20, 64)
            bench.ask(who, use)
            bench.ask(who, "give_back", warm_up, 64)
        bench.ask("maker", "calls")
        held = Conservation(arguments.device)
        bench.ask("neighbour", "start")
        time.sleep(1.0)
        result: dict[str, Any] = {"neighbour_alone_ms": bench.ask("neighbour", "stop"), "phases": [], "latencies": []}
        for size in arguments.sizes:
            result["phases"] += throughput(bench, held, size, arguments.gib, arguments.batch)
            result["latencies"] += latencies(bench, size, arguments.iterations)
            held.read(f"{size} MiB latencies")
        result["batches"] = batches(bench, 1.0)
        result["descriptor_limit"] = bench.ask("maker", "limit")
        most = int(result["descriptor_limit"] * 0.9) >> 9  # GiB in extents of 2 MiB
        result["scale"] = at_scale(bench, held, min(arguments.scale_gib, most))
        result["memory"] = held.readings
        result["conserved"] = held.exact
    finally:
        bench.close()
    _print(result)
    report.write(arguments.out, "gpu_contracts_extents", arguments.commit, result)


if __name__ == "__main__":
    main()
