"""From a folder of safetensors files that nobody has seen to a device: the whole system until the first token, and
whatever else reads such files, alone.

    python -m benchmarks.gpu.from_disk --out DIR [--shape 8b] [--device cuda:0] [--cache warm|cold] [--before]

A checkpoint of random bf16 weights is written first, in files of at most 5 GB as Hugging Face has them. Then, in this
order, each reader in a process of its own, its device and libraries made ready before its time counts:

    plain        the bytes alone, by pread into memory that is used again, by 1 thread and by --threads: the limit
    safetensors  safe_open of each file, every tensor to the device
    ours         the engine's reader with --threads, every tensor to the device
    fastsafetensors, runai
                 fastsafetensors and the Run:ai streamer, every tensor to the device; only where they can be imported

and, --runs times, the whole system with a model that is new to it: request sent until first token, through the gateway,
into a warm engine, with the steps in between and what the engine said of them. The first start of a machine compiles
kernels. --before does the same with the files read by SGLang itself, from a mapping of each.

`warm`: all files have just been read, so that they are in the page cache. `cold`: the page cache was told to drop them
(posix_fadvise), after they were written to the disk; what lies below (a virtual machine's host) may still have them.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib.util
import json
import os
import random
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.gpu import report, shapes
from benchmarks.gpu.residency import PROMPT, first_token, sleep, told, warm
from protos import common_pb2
from testing.systems.local import World, world

FILE_BYTES = 5_000_000_000
READ_BYTES = 8 << 20
SAID = (
    "host memory registered",
    "host memory not registered",
    "checkpoint read",
    "CUDA graphs captured",
    "private memory",
    "model active",
    "image made",
)
"""Events of the logs that tell where the time goes."""


# --- readers, each in a process of its own


def plain(files: Sequence[str], device: str, threads: int) -> Callable[[], int]:
    pieces = deque((file, at) for file in files for at in range(0, os.path.getsize(file), READ_BYTES))
    opened = {file: os.open(file, os.O_RDONLY) for file in files}
    memory = [bytearray(READ_BYTES) for _ in range(threads)]
    sizes = [0] * threads

    def work(number: int) -> None:
        while True:
            try:
                file, at = pieces.popleft()
            except IndexError:
                return
            sizes[number] += os.preadv(opened[file], [memory[number]], at)

    def read() -> int:
        running = [threading.Thread(target=work, args=(number,)) for number in range(threads)]
        for thread in running:
            thread.start()
        for thread in running:
            thread.join()
        return sum(sizes)

    return read


def by_safetensors(files: Sequence[str], device: str, threads: int) -> Callable[[], int]:
    from safetensors import safe_open

    on = device if device.startswith("cuda") else "cpu"

    def read() -> int:
        kept = []
        for file in files:
            with safe_open(file, framework="pt", device=on) as opened:
                kept += [_read_whole(opened.get_tensor(name)) for name in opened.keys()]
        return _settled(kept, device)

    return read


def ours(files: Sequence[str], device: str, threads: int) -> Callable[[], int]:
    import torch

    from gpu_scheduler.engines.sglang.base.options import Options
    from gpu_scheduler.engines.sglang.memory.host_buffer import HostBuffer
    from gpu_scheduler.engines.sglang.weights.read_ahead import ReadAhead

    options = Options.parse({"read_threads": str(threads)}, device)

    def read() -> int:
        nbytes = min(options.read_ahead_bytes, sum(os.path.getsize(file) for file in files))
        reader = ReadAhead(HostBuffer(nbytes, torch.device(device)), options.read_threads)
        kept = [tensor.to(device, copy=True) for _, tensor in reader.tensors(files)]
        reader.close()
        return _settled(kept, device)

    return read


def by_fastsafetensors(files: Sequence[str], device: str, threads: int) -> Callable[[], int]:
    from fastsafetensors import SafeTensorsFileLoader

    def read() -> int:
        loader = SafeTensorsFileLoader(None, device, nogds=True)  # GPUDirect Storage needs a file system that has it
        loader.add_filenames({0: list(files)})
        buffers = loader.copy_files_to_device()
        kept = [_read_whole(buffers.get_tensor(name)) for name in loader.get_keys()]
        return _settled(kept, device)

    return read


def by_runai(files: Sequence[str], device: str, threads: int) -> Callable[[], int]:
    from runai_model_streamer import SafetensorsStreamer

    def read() -> int:
        with SafetensorsStreamer() as streamer:
            streamer.stream_files(list(files))
            kept = [tensor.to(device, copy=True) for _, tensor in streamer.get_tensors()]
        return _settled(kept, device)

    return read


def _read_whole(tensor: Any) -> Any:
    """On the CPU a library may return a mapping of the file, of which nothing was read: that is no load."""
    return tensor.clone() if tensor.device.type == "cpu" else tensor


def _settled(tensors: Sequence[Any], device: str) -> int:
    import torch

    if device.startswith("cuda"):
        torch.cuda.synchronize()
    return sum(tensor.nbytes for tensor in tensors)


READERS = {
    "plain_1": (plain, ""),
    "plain_n": (plain, ""),
    "safetensors": (by_safetensors, "safetensors"),
    "ours": (ours, ""),
    "fastsafetensors": (by_fastsafetensors, "fastsafetensors"),
    "runai": (by_runai, "runai_model_streamer"),
}
"""With the library that each needs."""


def read_alone(name: str, files: Sequence[str], device: str, threads: int) -> None:
    """What the process of one reader does: prints bytes and seconds."""
    if not name.startswith("plain"):
        import torch

        torch.ones(1, device=device).sum().item()
    read = READERS[name][0](files, device, 1 if name == "plain_1" else threads)
    began = time.monotonic()
    nbytes = read()
    seconds = time.monotonic() - began
    print(json.dumps({"bytes": nbytes, "seconds": seconds, "gb_per_s": nbytes / seconds / 1e9}))


def readers(files: Sequence[str], device: str, threads: int, cache: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, (_, library) in READERS.items():
        if library and importlib.util.find_spec(library) is None:
            found[name] = {"absent": library}
            continue
        prepare(files, cache)
        command = [sys.executable, "-m", "benchmarks.gpu.from_disk", "--reader", name, "--device", device]
        command += ["--threads", str(threads), "--out", ".", "--files", *files]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            found[name] = {"failed": done.stderr.strip().splitlines()[-1:]}
        else:
            found[name] = json.loads(done.stdout.strip().splitlines()[-1])
        print(f"{name}: {found[name]}", flush=True)
    return found


def prepare(files: Sequence[str], cache: str) -> None:
    """Brings the page cache to what is asked for."""
    if cache == "warm":
        plain(files, "", 4)()
        return
    for file in files:
        fd = os.open(file, os.O_RDONLY)
        os.fsync(fd)  # what is not on the disk yet cannot be dropped
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)


# --- the whole system


def twin(folder: Path, name: str) -> Path:
    """The same files as another model: its configuration has another size, so it is none that was seen."""
    made = folder.parent / name
    made.mkdir()
    for path in folder.iterdir():
        if path.name == "config.json":
            (made / path.name).write_text(path.read_text() + " " * int(name.rpartition("-")[2]))
        else:
            os.symlink(path, made / path.name)
    return made


async def system(given: argparse.Namespace, folder: Path, files: Sequence[str], before: bool) -> list[dict[str, Any]]:
    models = {name: twin(folder, name) for name in (f"before-{i}" if before else f"new-{i}" for i in range(given.runs))}
    options = {name: str(value) for name, value in json.loads(given.options).items()}
    options["read_threads"] = "0" if before else str(given.threads)
    nbytes = sum(os.path.getsize(file) for file in files)
    local: dict[str, Any] = {"devices": {given.device: None}, "gateway": {"park_time_out_s": 400.0}}
    local["host_capacity_bytes"] = (given.runs + 1) * nbytes
    if not given.device.startswith("cuda"):  # where weights are float32
        local["devices"] = {given.device: 6 * nbytes + (256 << 20)}
        local["host_capacity_bytes"] *= 2
    listed = {name: {"path": str(path), "context_tokens": 1024} for name, path in models.items()}
    chance = random.Random(5)
    prompt = [chance.randrange(3, 2000) for _ in range(PROMPT)]
    runs: list[dict[str, Any]] = []
    async with world("sglang", listed, options=options, engine_log_level="info", **local) as at:
        logs = at.local.state / "logs"
        try:
            for name in models:
                runs.append(await start(at, name, files, prompt, given.cache, runs[-1] if runs else None))
                runs[-1]["read_by"] = "SGLang" if before else "us"
                await sleep(at, name, common_pb2.COLD, common_pb2.HIBERNATING)
        finally:
            given.out.mkdir(parents=True, exist_ok=True)
            for log in logs.glob("*.log"):
                (given.out / f"{'before-' if before else ''}{log.name}").write_bytes(log.read_bytes()[-(2 << 20) :])
        for run in runs:
            run["events"] = [event for event in told(logs, SAID) if run["sent"] <= stamp(event) < run["image"]]
    return runs


async def start(
    at: World, name: str, files: Sequence[str], prompt: list[int], cache: str, last: dict[str, Any] | None
) -> dict[str, Any]:
    """One start of a model that is new to the system."""
    while not await warm(at):
        await asyncio.sleep(0.2)
    prepare(files, cache)
    sent = time.time()
    seconds, said = await first_token(at, name, prompt)
    if last is not None and said != last["said"]:
        raise RuntimeError(f"{name}: {said!r} instead of {last['said']!r}")
    steps = dict((await at.measured(name)).step_s)
    print(f"{name}: first token after {seconds:.2f} s, {steps}", flush=True)
    waited = time.monotonic()
    await sleep(at, name, common_pb2.HIBERNATING, common_pb2.ACTIVE)  # waits for its image
    return {
        "seconds": seconds,
        "steps": steps,
        "sent": sent,
        "asleep_after_s": time.monotonic() - waited,
        "image": time.time(),
        "said": said,
    }


def stamp(event: dict[str, Any]) -> float:
    import datetime

    return datetime.datetime.fromisoformat(event["timestamp"]).timestamp()


def show(found: dict[str, Any]) -> None:
    limit = found["readers"]["plain_n"]["seconds"]
    rows = [
        (name, each["seconds"], each["gb_per_s"], f"{each['seconds'] / limit:.1f}")
        if "seconds" in each
        else (name, "-", "-", str(each))
        for name, each in found["readers"].items()
    ]
    report.table(
        f"files read alone, page cache {found['cache']}", ("reader", "s", "GB/s", "times plain, all threads"), rows
    )
    rows = []
    for run in found["system"]:
        read = next((event for event in run["events"] if event["event"] == "checkpoint read"), {})
        row = (run["read_by"], run["seconds"], run["steps"].get("taking an engine", 0.0))
        rows.append((*row, run["steps"].get("reading the checkpoint", 0.0), read.get("seconds", "-")))
    header = ("files read by", "first token, s", "taking an engine", "until proven", "of it model built and files read")
    report.table("the whole system, a folder never seen", header, rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--shape", default="8b", choices=shapes.NAMES)
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--cache", default="warm", choices=("warm", "cold"))
    parser.add_argument("--threads", type=int, default=8)
    parser.add_argument("--runs", type=int, default=3, help="starts of the whole system's models")
    parser.add_argument("--before", action="store_true", help="also with the files read by SGLang itself")
    parser.add_argument("--folder", type=Path, help="where the checkpoint is written, 16 GB for 8b")
    parser.add_argument("--file-bytes", type=int, default=FILE_BYTES)
    parser.add_argument("--commit", default="unknown")
    parser.add_argument("--options", default="{}", help="engine options as JSON")
    parser.add_argument("--reader", choices=READERS, help=argparse.SUPPRESS)
    parser.add_argument("--files", nargs="+", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.reader:
        read_alone(given.reader, given.files, given.device, given.threads)
        return
    with tempfile.TemporaryDirectory(dir=given.folder) as name:
        began = time.monotonic()
        kind = given.device.partition(":")[0]
        folder = shapes.write_checkpoint(Path(name) / given.shape, given.shape, kind, given.file_bytes)
        files = sorted(str(path) for path in folder.glob("*.safetensors"))
        nbytes = sum(os.path.getsize(file) for file in files)
        found: dict[str, Any] = {"shape": given.shape, "cache": given.cache, "bytes": nbytes, "files": len(files)}
        found["threads"] = given.threads
        print(f"{nbytes / 1e9:.2f} GB in {len(files)} files, {time.monotonic() - began:.1f} s", flush=True)
        found["readers"] = readers(files, given.device, given.threads, given.cache)
        found["system"] = asyncio.run(system(given, folder, files, before=False))
        if given.before:
            found["system"] += asyncio.run(system(given, folder, files, before=True))
    show(found)
    report.write(given.out, "from_disk", given.commit, found)


if __name__ == "__main__":
    main()
