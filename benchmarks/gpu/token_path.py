"""Allocating and freeing KV slots without waiting for the device, beside what SGLang does.

Questions: what does a decode step's allocation cost on the host with ids chosen there, beside SGLang's device
tensors; does anything on that path synchronise; how long until a freed id is known on the host; and is an extent safe
to unmap after the event behind the last launch, while later kernels run?

    python -m benchmarks.gpu.token_path --out DIR --commit HASH       (needs SGLang 0.5.23 and its kernels)
"""

from __future__ import annotations

import random
import subprocess
import sys
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from benchmarks.gpu import report

PAGE_SIZE = 16
PROMPT, OUTPUT = 512, 64  # tokens; a request of each batch ends every OUTPUT / batch steps
_NOW = time.perf_counter_ns


@contextmanager
def sync_mode(mode: str) -> Iterator[list[warnings.WarningMessage]]:
    """torch's synchronisation check: "error" raises at the first one, "warn" collects them."""
    import torch

    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode(mode)
        try:
            yield seen
        finally:
            torch.cuda.set_sync_debug_mode("default")


def _spin(event: Any) -> None:
    while not event.query():
        pass


def _allocator(kind: str, tokens: int, device: str) -> Any:
    import torch
    from sglang.kernels.ops.memory.allocator import alloc_decode_kernel, alloc_extend_kernel
    from sglang.srt.mem_cache.allocator import PagedTokenToKVPoolAllocator, TokenToKVPoolAllocator

    from benchmarks.gpu.host_pages import HostPages

    if kind == "sglang, pages of 1":
        return TokenToKVPoolAllocator(tokens, torch.bfloat16, device, None, False)
    if kind == "sglang, pages of 16":
        return PagedTokenToKVPoolAllocator(tokens, PAGE_SIZE, torch.bfloat16, device, None, False)
    return HostPages(tokens // PAGE_SIZE, PAGE_SIZE, 4, device, (alloc_decode_kernel, alloc_extend_kernel))


class Loop:
    """SGLang's overlapped decode loop, with the model replaced by a graph that streams weights.

    Order of one step as in the scheduler of SGLang 0.5.16: allocate on the schedule stream; the forward stream waits
    for it and runs; the schedule stream is fenced behind the forward ("event": behind a point near its start, as with
    decode graphs; "whole": behind all of it, as after a prefill); then the results of the step before are awaited,
    and what ended is freed.
    """

    def __init__(self, kind: str, batch: int, fence: str, load: Any, device: str) -> None:
        import torch

        self._torch, self._kind, self._batch, self._fence, self._load, self._device = (
            torch,
            kind,
            batch,
            fence,
            load,
            device,
        )
        self._allocator = _allocator(kind, 4 * batch * (PROMPT + OUTPUT) + (1 << 14), device)
        self._schedule, self._forward = torch.cuda.Stream(), load.stream
        self._table = torch.zeros(batch + 1, PROMPT + OUTPUT + 64, dtype=torch.int32, device=device)
        self._rows = torch.arange(1, batch + 1, device=device)
        # Lengths are staggered so that about as many requests end in each step.
        self._cpu = torch.tensor([PROMPT + 1 + (i * OUTPUT) // batch for i in range(batch)], dtype=torch.int64)
        self._gpu = self._cpu.to(device)
        self._constant = {
            "zero": torch.zeros(1, dtype=torch.int64, device=device),
            "prompt": torch.full((1,), PROMPT + 1, dtype=torch.int64, device=device),
            "none": torch.full((1,), -1, dtype=torch.int64, device=device),
        }
        with torch.cuda.stream(self._schedule):
            for row in range(batch):
                self._admit(row, int(self._cpu[row]))
        torch.cuda.synchronize()

    def _admit(self, row: int, length: int) -> float:
        torch = self._torch
        begun = _NOW()
        if "pages of 1" in self._kind and "16" not in self._kind:
            slots = self._allocator.alloc(length)
        else:
            there = self._constant["prompt"] if length == PROMPT + 1 else torch.tensor([length], device=self._device)
            zero = torch.zeros(1, dtype=torch.int64)
            slots = self._allocator.alloc_extend(
                self._constant["zero"], zero, there, torch.tensor([length]), self._constant["none"], length
            )
        ended = _NOW()
        if slots is None:
            raise RuntimeError(f"{self._kind}: no pages left; the pool of this benchmark is too small")
        self._table[row + 1, :length] = slots.to(torch.int32)
        return (ended - begun) / 1e3

    def run(self, steps: int) -> dict[str, Any]:
        """Host microseconds: `alloc` and `poll` of each step, `free` of all that end in it, `admit` of each."""
        torch, allocator = self._torch, self._allocator
        samples: dict[str, list[float]] = {"alloc": [], "free": [], "admit": [], "poll": [], "step_ms": []}
        previous = None
        paged = self._kind != "sglang, pages of 1"
        ours = hasattr(allocator, "poll")
        with torch.cuda.stream(self._schedule):
            for _ in range(steps):
                started = _NOW()
                last = self._table[self._rows, self._gpu - 1]
                self._gpu = self._gpu + 1
                self._cpu = self._cpu + 1
                t0 = _NOW()
                slots = allocator.alloc_decode(self._gpu, self._cpu, last) if paged else allocator.alloc(self._batch)
                t1 = _NOW()
                self._table[self._rows, self._gpu - 1] = slots.to(torch.int32)
                samples["alloc"].append((t1 - t0) / 1e3)
                self._forward.wait_stream(self._schedule)
                read_done, done = torch.cuda.Event(), torch.cuda.Event()
                read_done.record(self._forward)
                self._load.step()
                done.record(self._forward)
                if ours:
                    allocator.launched(done)
                self._schedule.wait_event(read_done if self._fence == "event" else done)
                if previous is not None:
                    _spin(previous)
                previous = done
                ended = torch.nonzero(self._cpu >= PROMPT + OUTPUT).flatten().tolist()
                if ended:
                    rows = [self._table[row + 1, : int(self._cpu[row])] for row in ended]
                    t0 = _NOW()
                    allocator.free_group_begin()
                    for slots in rows:
                        allocator.free(slots)
                    allocator.free_group_end()
                    samples["free"].append((_NOW() - t0) / 1e3)
                for row in ended:
                    self._cpu[row] = PROMPT + 1
                    self._gpu[row : row + 1].copy_(self._constant["prompt"])
                    samples["admit"].append(self._admit(row, PROMPT + 1))
                if ours:
                    t0 = _NOW()
                    allocator.poll()
                    samples["poll"].append((_NOW() - t0) / 1e3)
                samples["step_ms"].append((_NOW() - started) / 1e6)
        torch.cuda.synchronize()
        return {name: [round(x, 2) for x in values] for name, values in samples.items()}


def host_cost(device: str, load: Any, steps: int) -> list[dict[str, Any]]:
    """Each allocator at each batch and fence: costs, and what the synchronisation check says."""
    entries = []
    for kind in ("sglang, pages of 1", "sglang, pages of 16", "host-chosen, pages of 16"):
        for batch in (1, 32, 256):
            for fence in ("event", "whole"):
                loop = Loop(kind, batch, fence, load, device)
                loop.run(2 * OUTPUT)
                samples = loop.run(steps)
                with sync_mode("warn") as seen:
                    loop.run(80)
                where = sorted({str(w.message).split("\n")[0] for w in seen})
                refused = ""
                if kind.startswith("host"):
                    try:
                        with sync_mode("error"):
                            loop.run(80)
                    except RuntimeError as error:
                        refused = str(error).split("\n")[0]
                entries.append(
                    {
                        "kind": kind,
                        "batch": batch,
                        "fence": fence,
                        "samples": samples,
                        "synchronisations_in_80_steps": len(seen),
                        "messages": where,
                        "error_mode": refused or ("passed" if kind.startswith("host") else "not run"),
                    }
                )
    return entries


def arrival(device: str, load: Any, repeats: int = 60) -> list[dict[str, Any]]:
    """From freeing 576 slots until the host knows their ids, the forward stream busy, for three places of the copy."""
    import torch

    schedule, side, forward = torch.cuda.Stream(), torch.cuda.Stream(), load.stream
    slots = torch.arange(576, device=device, dtype=torch.int32)
    pinned = torch.empty(576, dtype=torch.int32, pin_memory=True)
    entries = []
    torch.cuda.synchronize()
    for place in (
        "schedule stream, fenced near the forward's start",
        "schedule stream, fenced behind the forward",
        "side stream",
    ):
        waits, forwards = [], []
        for _ in range(repeats):
            written, read_done, done, arrived = (torch.cuda.Event() for _ in range(4))
            written.record(schedule)
            forward.wait_event(written)
            read_done.record(forward)
            launched = _NOW()
            for _ in range(8):
                load.step()
            done.record(forward)
            schedule.wait_event(done if "behind" in place else read_done)
            side.wait_event(written)
            begun = _NOW()
            with torch.cuda.stream(side if place == "side stream" else schedule):
                pinned.copy_(slots, non_blocking=True)
                arrived.record()
            _spin(arrived)
            waits.append(round((_NOW() - begun) / 1e3, 1))
            _spin(done)
            forwards.append(round((_NOW() - launched) / 1e3, 1))
        entries.append({"place": place, "until_known_us": waits, "forward_us": forwards})
    return entries


class UnmapUnderLoad:
    """Requests come and go over a range whose extents are unmapped and replaced while kernels read the others.

    Every page of a request holds its number; each step reads all live pages and counts what differs. A page that is
    unmapped too early faults; one that is replaced too early is counted.
    """

    PAGE, PER_EXTENT, EXTENTS, ROWS, DEPTH = 1 << 20, 2, 256, 24, 8

    def __init__(self, device: int) -> None:
        import torch

        from benchmarks.gpu import vmm
        from benchmarks.gpu.host_pages import FreePages

        self._torch, self._vmm = torch, vmm
        torch.cuda.set_device(device)
        torch.zeros(1, device="cuda")
        self._extents = vmm.Extents(device)
        self._bytes = self.PAGE * self.PER_EXTENT
        self._base = vmm.reserve(self._bytes * self.EXTENTS)
        self._handles: dict[int, Any] = {}
        self._map(0)
        words = self.PAGE // 4
        self._kv = vmm.bytes_at(self._base, self._bytes * self.EXTENTS, device).view(torch.int32).view(-1, words)
        self._pages = FreePages(self.EXTENTS * self.PER_EXTENT, self.PER_EXTENT)
        for extent in range(1, self.EXTENTS):
            self._pages.withdraw(extent)
        self._pages.take(1)  # the other page of extent 0, which stays mapped like page 0 beside it
        self._kv[0].zero_()
        size = self.ROWS * self.DEPTH
        self._table = torch.zeros(size, dtype=torch.int64, device="cuda")
        self._expected = torch.zeros(size, dtype=torch.int32, device="cuda")
        self._bad = torch.zeros((), dtype=torch.int64, device="cuda")
        self._forward = torch.cuda.Stream()
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(self._forward):
            self._read()
        torch.cuda.synchronize()
        with torch.cuda.graph(self._graph, stream=self._forward):
            for _ in range(4):
                self._read()
        torch.cuda.synchronize()
        self._bad.zero_()

    def _read(self) -> None:
        seen = self._kv.index_select(0, self._table)
        self._bad.add_((seen != self._expected[:, None]).sum())

    def _map(self, extent: int) -> None:
        handle = self._extents.create(self._bytes)
        address = self._base + extent * self._bytes
        self._extents.map(address, self._bytes, handle)
        self._extents.allow(address, self._bytes)
        self._handles[extent] = handle

    def _unmap(self, extent: int) -> None:
        self._extents.unmap(self._base + extent * self._bytes, self._bytes)
        self._extents.release(self._handles.pop(extent))

    def _take(self, count: int) -> list[int]:
        while self._pages.count < count:
            extent = next(e for e in range(1, self.EXTENTS) if e not in self._handles)
            self._map(extent)
            self._pages.restore(extent)
        return self._pages.take(count) or []

    def run(self, steps: int, too_early: bool = False) -> dict[str, Any]:
        """`too_early` unmaps without waiting, to show that the check can fail."""
        torch, chance = self._torch, random.Random(0)
        rows: list[list[int]] = [[] for _ in range(self.ROWS)]
        quarantine: dict[int, Any] = {}
        unmap_us: list[float] = []
        busy = unmapped = number = 0
        previous = None
        pinned = [torch.zeros(2, self.ROWS * self.DEPTH, dtype=torch.int64).pin_memory() for _ in range(4)]
        values = [0] * self.ROWS
        with sync_mode("error"), torch.cuda.stream(self._forward):
            for step in range(steps):
                fresh: list[int] = []
                fresh_values: list[int] = []
                freed: list[int] = []
                for row in range(self.ROWS):
                    if rows[row] and chance.random() < 0.15:
                        freed += rows[row]
                        rows[row] = []
                    elif not rows[row] and chance.random() < 0.5:
                        number += 1
                        rows[row] = self._take(chance.randint(1, self.DEPTH))
                        values[row] = number
                        fresh += rows[row]
                        fresh_values += [number] * len(rows[row])
                staged = pinned[step % len(pinned)]
                flat = staged.numpy()
                flat[:] = 0
                for row in range(self.ROWS):
                    at = row * self.DEPTH
                    flat[0, at : at + len(rows[row])] = rows[row]
                    flat[1, at : at + len(rows[row])] = values[row]
                if fresh:
                    ids = torch.tensor(fresh).pin_memory().to("cuda", non_blocking=True)
                    marks = torch.tensor(fresh_values, dtype=torch.int32).pin_memory().to("cuda", non_blocking=True)
                    self._kv.index_copy_(0, ids, marks[:, None].expand(-1, self._kv.shape[1]).contiguous())
                self._table.copy_(staged[0], non_blocking=True)
                self._expected.copy_(staged[1].to(torch.int32).pin_memory(), non_blocking=True)
                # The step launched before this one still reads what is freed here; so does, on purpose, nothing after
                # it.
                last_reader = previous
                self._graph.replay()
                done = torch.cuda.Event()
                done.record()
                if too_early:
                    ready = self._pages.give(freed)
                else:
                    for extent in self._pages.give(freed):
                        quarantine.pop(extent, None)
                        quarantine[extent] = done
                    ready = [e for e, event in quarantine.items() if event.query()]
                for extent in ready:
                    quarantine.pop(extent, None)
                    if self._pages.is_empty(extent):
                        t0 = _NOW()
                        self._unmap(extent)
                        unmap_us.append(round((_NOW() - t0) / 1e3, 1))
                        busy += not self._forward.query()
                        unmapped += 1
                        self._pages.withdraw(extent)
                if last_reader is not None:
                    _spin(last_reader)
                previous = done
        torch.cuda.synchronize()
        return {
            "steps": steps,
            "requests": number,
            "unmapped": unmapped,
            "unmapped_while_kernels_ran": busy,
            "wrong_words": int(self._bad.item()),
            "unmap_us": unmap_us,
        }


def fault_control(device: int) -> dict[str, Any]:
    """Run the same without quarantine, in a process of its own: a fault, or wrong words, is what it should show."""
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "benchmarks.gpu.token_path",
            "--out",
            "/dev/null",
            "--too-early",
            "--device",
            str(device),
        ],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    said = [line for line in (done.stdout + done.stderr).splitlines() if "CUDA error" in line or "wrong_words" in line]
    return {"exit_status": done.returncode, "said": said[-1][:300] if said else ""}


def _print(result: dict[str, Any]) -> None:
    rows = []
    for e in result["host_cost"]:
        s = e["samples"]
        spread = report.spread(s["alloc"])
        poll = report.spread(s["poll"])["p50"] if s["poll"] else 0.0
        free = report.spread(s["free"])
        admit = report.spread(s["admit"])["p50"]
        step = report.spread(s["step_ms"])["p50"]
        syncs = e["synchronisations_in_80_steps"]
        rows.append(
            (
                e["kind"],
                e["batch"],
                e["fence"],
                spread["p50"],
                spread["p99"],
                free["p50"],
                free["p99"],
                poll,
                admit,
                step,
                syncs,
                e["error_mode"],
            )
        )
    header = (
        "allocator",
        "batch",
        "fence",
        "alloc p50 us",
        "p99",
        "free p50 us",
        "p99",
        "poll p50",
        "admit p50",
        "step ms",
        "syncs",
        "error mode",
    )
    report.table("host microseconds", header, rows)
    rows = [
        (
            e["place"],
            *(report.spread(e["until_known_us"])[q] for q in ("p50", "p99")),
            report.spread(e["forward_us"])["p50"],
        )
        for e in result["arrival"]
    ]
    report.table("freed ids on the host", ("copy on", "p50 us", "p99", "forward us"), rows)
    print(
        "unmap under load:",
        {k: v for k, v in result["unmap"].items() if k != "unmap_us"},
        report.spread(result["unmap"]["unmap_us"]),
    )
    print("without quarantine:", result["fault_control"], flush=True)


def main() -> None:
    parser = report.arguments(__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--too-early", action="store_true", help="only the run without quarantine, which should fail")
    arguments = parser.parse_args()
    if arguments.too_early:
        print(UnmapUnderLoad(arguments.device).run(200, too_early=True))
        return
    import torch

    from benchmarks.gpu.decode_like import DecodeLike

    torch.cuda.set_device(arguments.device)
    load = DecodeLike(arguments.device, layers=24)
    device = f"cuda:{arguments.device}"
    result = {
        "host_cost": host_cost(device, load, arguments.steps),
        "arrival": arrival(device, load),
        "unmap": UnmapUnderLoad(arguments.device).run(600),
        "fault_control": fault_control(arguments.device),
    }
    _print(result)
    report.write(arguments.out, "gpu_contracts_token_path", arguments.commit, result)


if __name__ == "__main__":
    main()
