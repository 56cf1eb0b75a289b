"""Do models of all classes and formats say what unmodified SGLang says of the same files, also after they slept?

    python -m benchmarks.gpu.formats --out DIR --commit HASH [--device cuda:0] [--cases qwen3:fp8,gpt-oss:mxfp4,...]

For each case, a name of `model_configs` (NAME@LAYERS: its first layers alone) and a format of
`testing/format_checkpoints.py`, a checkpoint with random weights is written and looked at as the loader does; or a
class and "small", as Transformers makes it (`testing/small_checkpoints.py`). A third part, "fp8", is the type of the
KV. Unmodified SGLang answers all prompts at once, and some at a time in other orders, also with as little KV as our
engine has at times: where its own answers part is what they depend on anyway. Our engine answers from the files,
several times asleep and awake in between, while its limit moves; and once more in a process that got the weights from
an image alone. With --shared all models are on one node, and once each was compared by itself all are asked at the same
time, for some seconds, while the limits of all move.

DIR/gpu_formats.json has for each case the partings, the bytes of the weights range beside those of the tensors in it,
the loader's estimates, and the seconds of each wake. Exit status 1 if answers part by more than SGLang's own or far
more often, weights or checksums differ, or a case failed.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import shutil
import sys
import tempfile
import time
import traceback
from collections.abc import Coroutine, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.gpu import fleet, report
from benchmarks.gpu.answers import Answer, partings, widest
from benchmarks.gpu.fleet import Client, Model, say
from benchmarks.gpu.model_configs import config_of
from benchmarks.gpu.same_answers import make_prompts
from loader.checkpoints.checkpoint import read
from loader.policy.floor import floor_bytes
from protos import engine_pb2
from services.runtime import tasks
from testing import format_checkpoints, small_checkpoints
from testing.engines import harness
from testing.engines.images import Image

CASES = (
    "qwen3.5:bf16", "nemotron-h:bf16", "qwen3.5-moe:bf16", "qwen3-next:bf16", "qwen3.5-images:bf16",
    "qwen3.5-moe-images:bf16", "deepseek-v2:bf16", "deepseek-v3:bf16",
    "glm4-moe-lite:bf16", "gemma4:bf16", "gemma4-moe:bf16", "qwen3-moe:bf16", "gemma3:bf16", "gpt-oss:mxfp4",
    "qwen3:fp8-blocks", "qwen3:fp8", "qwen3-moe:fp8-blocks", "llama:fp8-channels", "llama:int8", "llama:int4",
    "llama:awq", "llama:gptq", "mixtral:bf16", "glm4-moe:fp8-blocks", "minimax-m2:fp8-blocks",
)  # fmt: skip
_STRICT = {"SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_BUSY": "1"}
_RUN_S = 120.0
_SHARED_BYTES = 120 << 30
"""Bytes that the node of --shared hands out."""
_MOVE_S = 0.1
_LEAST_KV = 16 << 20
"""Bytes of the lowest limit of KV: with fewer, engines wait for their first extent."""
_PROMPTS_AWAKE = 6
_PARTINGS, _STRAY_PARTINGS = 2, 3
"""Answers that may part from unmodified SGLang's for each of its own that do, and as many more. The widest gap says
nothing where SGLang's own answers part by a choice of experts: such gaps have no bound."""
_RERUNS = (2, 3, 5, 6, 8, 12)
"""Requests at a time in the further runs of unmodified SGLang, each in an order of its own."""
_RERUNS_WITH_LITTLE = (8, 11)
"""Requests at a time in the runs of unmodified SGLang that has as little KV as our engine at times."""


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder for the JSON file")
    parser.add_argument("--commit", default="unknown")
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--cases", default=",".join(CASES), help="NAME:FORMAT[:KV], separated by commas")
    parser.add_argument("--together", type=int, default=4, help="cases at the same time")
    parser.add_argument("--shared", type=float, default=0.0, help="seconds that all models are asked at the same time")
    parser.add_argument("--naps", type=int, default=2, help="times that each model sleeps")
    parser.add_argument("--prompts", type=int, default=24)
    parser.add_argument("--longest", type=int, default=700, help="prompt, in tokens")
    parser.add_argument("--new", type=int, default=32, help="tokens of an answer")
    parser.add_argument("--folders", type=Path, help="where checkpoints are, and stay")
    parser.add_argument("--options", default="", help="engine options as NAME=VALUE, separated by commas")
    given = parser.parse_args()
    if given.shared and given.together < len(given.cases.split(",")):
        parser.error("--shared: all cases have to be there at the same time (--together)")
    return given


async def answers(client: Client, asked: Sequence[Sequence[int]], new: int, in_flight: int) -> list[Answer]:
    """Greedy answers to all prompts, in the order of the prompts, `in_flight` at a time. Raises RuntimeError if a
    request fails."""
    order = list(range(len(asked)))
    if in_flight < len(asked):
        random.Random(in_flight).shuffle(order)
    found: dict[int, Answer] = {}
    waiting = iter(order)

    async def ask() -> None:
        for number in waiting:
            reply = client.ask(asked[number], new, logprobs=True, top_logprobs=10)
            await reply.ended.wait()
            if not reply.ok:
                raise RuntimeError(f"{client.name}, prompt {number}: finish {reply.finish}, {reply.error!r}")
            found[number] = Answer(reply.tokens, reply.top)

    async with asyncio.timeout(_RUN_S):
        await asyncio.gather(*(ask() for _ in range(in_flight)))
    return [found[number] for number in range(len(asked))]


def by_transformers(folder: Path, asked: Sequence[Sequence[int]], new: int) -> list[Answer]:
    """Greedy answers of Transformers to all prompts, one at a time, in float32 on the host."""
    import torch
    import transformers

    architecture = json.loads((folder / "config.json").read_text())["architectures"][0]
    model = getattr(transformers, architecture).from_pretrained(folder, dtype=torch.float32).eval()
    found = []
    for prompt in asked:
        done = model.generate(
            torch.tensor([prompt]),
            max_new_tokens=new,
            min_new_tokens=new,
            do_sample=False,
            output_logits=True,
            return_dict_in_generate=True,
        )
        best = [each[0].log_softmax(0).topk(10) for each in done.logits]
        top = [dict(zip(each.indices.tolist(), each.values.tolist(), strict=True)) for each in best]
        found.append(Answer(done.sequences[0, len(prompt) :].tolist(), top))
    return found


def live_bytes(manifest: bytes) -> int:
    """Bytes that the tensors of a manifest take, those that share bytes once."""
    spans = []
    for tensor in engine_pb2.Manifest.FromString(manifest).tensors:
        reach = 1 + sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride, strict=True))
        spans.append((tensor.offset_bytes, tensor.offset_bytes + reach * _itemsize(tensor.dtype)))
    end = total = 0
    for start, stop in sorted(spans):
        total += max(0, stop - max(start, end))
        end = max(end, stop)
    return total


def _itemsize(name: str) -> int:
    import torch

    dtype = getattr(torch, name)
    assert isinstance(dtype, torch.dtype)
    return dtype.itemsize


class Gate:
    """Meeting point of the cases that have not failed."""

    def __init__(self, cases: int) -> None:
        self._cases = cases
        self._waiting = 0
        self._opened = asyncio.Event()

    async def wait(self) -> None:
        """Waits until all other cases wait here or have failed."""
        opened = self._opened
        self._waiting += 1
        self._open_if_all()
        await opened.wait()

    def leave(self) -> None:
        """Takes the caller out: the others wait for it no longer."""
        self._cases -= 1
        self._open_if_all()

    def _open_if_all(self) -> None:
        if self._waiting >= self._cases:
            self._opened.set()
            self._opened, self._waiting = asyncio.Event(), 0


class Case:
    """One model in one format."""

    def __init__(self, given: argparse.Namespace, name: str, folder: Path, gate: Gate | None) -> None:
        self.name = name
        self.found: dict[str, Any] = {"case": name}
        self.problems: list[str] = []
        self._given = given
        self._model, self._format, *kv = name.split(":")
        self._kv_dtype = kv[0] if kv else ""
        self._folder = (given.folders or folder) / f"{self._model}-{self._format}"
        self._own = folder / f"run-{name.replace(':', '-')}"
        self._gate = gate
        self._names = {what: f"{name}-{what}".replace(":", "-") for what in ("files", "image")}

    async def write(self) -> None:
        """Writes the checkpoint, unless it is there."""
        begun = time.monotonic()
        if self._format == "small":
            if not self._folder.exists():
                await asyncio.to_thread(small_checkpoints.write, self._model, self._folder)
        elif not (self._folder / "model.safetensors.index.json").exists():
            place = "cpu" if self._given.device.startswith("cpu") else self._given.device
            # Another run, on another GPU, may look for the same checkpoint.
            begun_folder = self._folder.with_name(f"{self._folder.name}.{os.getpid()}")
            write = format_checkpoints.write
            await asyncio.to_thread(write, begun_folder, config_of(self._model), self._format, place)
            (begun_folder / "tokenizer.json").write_text("{}")
            try:
                begun_folder.rename(self._folder)
            except OSError:  # the other one was quicker
                shutil.rmtree(begun_folder)
            say(f"{self.name}: checkpoint written in {time.monotonic() - begun:.1f} s")

    async def run(self, shared: harness.Node | None) -> None:
        self._own.mkdir()
        given = self._given
        await self.write()
        self._checkpoint = read(self._folder, 4 if given.device.startswith("cpu") else 2, kv_dtype=self._kv_dtype)
        longest = min(given.longest, self._checkpoint.context_tokens - given.new)
        asked, _ = make_prompts(given.prompts, longest, self._checkpoint.vocabulary, seed=7)
        lengths = [len(prompt) + given.new for prompt in asked]
        tokens = sum(lengths)
        options = {"max_running_requests": 32, "cuda_graphs": 1}
        options |= {
            key: int(value) for key, _, value in (each.partition("=") for each in given.options.split(",")) if key
        }
        self._served = Model(
            self._folder,
            given.device,
            longest + given.new,
            options,
            (),
            self._checkpoint.weights_bytes,
            self._kv_dtype,
        )
        extent = harness.extent_bytes(given.device)
        kinds = self._checkpoint.kv.in_extents(extent)
        need = sum(map(kinds.bytes_of, lengths))
        floor = floor_bytes(longest + given.new, 0, kinds, extent)
        self._least = max(_LEAST_KV, floor, -(-need // 4 // extent) * extent)
        self._most = max(4 * _LEAST_KV, -(-2 * need // extent) * extent)
        weights = int(1.3 * self._checkpoint.weights_bytes) + (1 << 30)
        async with contextlib.AsyncExitStack() as stack:
            capacity = 2 * (weights + self._most) + (2 << 30)
            at = shared or await stack.enter_async_context(harness.node(self._own, capacity, given.device))
            await at.book(self._names["files"], floor_bytes=self._least, weights_bytes=weights)
            await at.limit(self._names["files"], self._most)
            self._most_stock = weights + (16 << 30)
            starting = [
                tasks.spawn(
                    fleet.elastic(at, self._names["files"], self._served, poison=True, environment=_STRICT), "ours"
                ),
                tasks.spawn(self._stock("stock", int(1.5 * tokens)), "stock"),
            ]
            await asyncio.wait(starting)
            try:
                await self._compare(at, *(each.result() for each in starting), asked)
            finally:
                await fleet.stop([each.result() for each in starting if each.exception() is None])

    def _stock(self, name: str, tokens: int) -> Coroutine[Any, Any, Client]:
        """Unmodified SGLang with KV for so many tokens."""
        return fleet.reference(name, self._served, -(-tokens // 64) * 64, most_bytes=self._most_stock)

    async def _compare(self, at: harness.Node, ours: Client, stock: Client, asked: list[list[int]]) -> None:
        given, measured = self._given, ours.measured
        live = live_bytes(ours.mapped[0].manifest)
        self.found |= {
            "weights_bytes": measured.weights_bytes,
            "live_bytes": live,
            "range_bytes": max(
                tensor.offset_bytes for tensor in engine_pb2.Manifest.FromString(ours.mapped[0].manifest).tensors
            ),
            "loader_weights_bytes": self._checkpoint.weights_bytes,
            "kv_bytes_per_token": measured.kv_bytes_per_token,
            "loader_kv_bytes_per_token": self._checkpoint.kv_bytes_per_token,
            "quantisation": self._checkpoint.quantisation,
            "private_bytes": measured.private_bytes,
        }
        image = Image(at.handoff, given.device, measured.weights_bytes)
        try:
            await image.take(ours.lease_id)
            base = await answers(stock, asked, given.new, len(asked))
            own = [await answers(stock, asked, given.new, few) for few in _RERUNS]
            await fleet.stop([stock])
            little = await self._stock("stock with little", self._checkpoint.kv.most_tokens(self._least))
            own += [await answers(little, asked, given.new, few) for few in _RERUNS_WITH_LITTLE]
            await fleet.stop([little])
            alone = [partings(base, each) for each in own]
            bound = max(widest(each) for each in alone)
            parted_alone = [len(each) for each in alone]
            most = _PARTINGS * max(parted_alone) + _STRAY_PARTINGS
            # Which prompts SGLang's own answers part at tells whether a wide gap of ours is at one of those.
            self.found |= {"bound": bound, "stock_partings": parted_alone}
            self.found["stock_partings_all"] = [[asdict(one) for one in each] for each in alone]
            runs = {"files": await answers(ours, asked, given.new, len(asked))}
            naps = []
            for nap in range(given.naps):
                begun = time.monotonic()
                await ours.hibernate()
                asleep = time.monotonic()
                mapped: list[float] = []

                async def fill(mapped: list[float] = mapped) -> None:
                    mapped.append(time.monotonic())
                    await image.put(ours.lease_id)
                    mapped.append(time.monotonic())

                await ours.wake(fill)
                wake_s = time.monotonic() - asleep
                rate = measured.weights_bytes / wake_s
                nap_s = {"hibernate_s": asleep - begun, "wake_s": wake_s, "mapped_s": mapped[0] - asleep}
                naps.append(nap_s | {"copy_s": image.copy_s, "filled_s": mapped[1] - asleep, "bytes_per_s": rate})
                # The engine compares the checksum each time; all prompts are asked after the first two.
                some = asked if nap < 2 else asked[:_PROMPTS_AWAKE]
                runs[f"awake {nap}"] = await answers(ours, some, given.new, 8)
            mover = tasks.spawn(self._move(at), "limits")
            runs["limits move"] = await answers(ours, asked, given.new, 8)
            await tasks.cancel(mover)
            self.found |= {"naps": naps, "stats": fleet.as_dict(ours.stats)}
            if self._gate is not None:
                await self._gate.wait()
                runs |= await self._beside_others(at, ours, asked)
                await self._gate.wait()
            other = await self._from_image(at, image, ours)
            try:
                runs["image"] = await answers(other, asked, given.new, len(asked))
            finally:
                await fleet.stop([other])
        finally:
            await image.close()
        if self._format == "small":
            parted = partings(await asyncio.to_thread(by_transformers, self._folder, asked, given.new), runs["files"])
            self.found["transformers"] = {"partings": len(parted), "widest": widest(parted)}
            say(f"{self.name}: Transformers says otherwise {len(parted)} times, by {widest(parted):.3g}")
        self.found["runs"] = {}
        for name, each in runs.items():
            parted = partings(base[: len(each)], each)
            gap = widest(parted)
            self.found["runs"][name] = {"partings": len(parted), "widest": gap, "all": [asdict(one) for one in parted]}
            if len(parted) > most:
                self.problems.append(f"{self.name}, {name}: {len(parted)} answers part; own: {max(parted_alone)}")
            if gap > max(bound, 0.02):
                self.problems.append(f"{self.name}, {name}: {len(parted)} answers part, by {gap:.3g}; own: {bound:.3g}")
            if len({tuple(one.tokens[:8]) for one in each}) < len(each) // 2:
                self.problems.append(f"{self.name}, {name}: answers are alike, which shows nothing")
        if measured.weights_bytes > 1.01 * live + (64 << 20):
            self.problems.append(f"{self.name}: {measured.weights_bytes} bytes in the range, {live} are live")

    async def _beside_others(
        self, at: harness.Node, ours: Client, asked: Sequence[Sequence[int]]
    ) -> dict[str, list[Answer]]:
        mover = tasks.spawn(self._move(at), "limits")
        found: dict[str, list[Answer]] = {}
        end = time.monotonic() + self._given.shared
        while time.monotonic() < end:
            found[f"beside others {len(found)}"] = await answers(ours, asked, self._given.new, 12)
        await tasks.cancel(mover)
        return found

    async def _move(self, at: harness.Node) -> None:
        chance = random.Random(1)
        while True:
            await at.limit(self._names["files"], chance.choice((self._least, 2 * self._least, self._most)))
            await asyncio.sleep(_MOVE_S)

    async def _from_image(self, at: harness.Node, image: Image, first: Client) -> Client:
        """An engine that gets its weights from the image of the first."""
        begun = time.monotonic()
        weights = first.measured.weights_bytes + first.measured.graph_bytes + (256 << 20)
        await at.book(self._names["image"], floor_bytes=self._least, weights_bytes=weights)
        await at.limit(self._names["image"], self._most)
        client = Client("image", await fleet.warm("sglang", {}))
        load = harness.load(
            at,
            self._names["image"],
            self._folder,
            context_tokens=self._served.context_tokens,
            weights_bytes=self._served.weights_bytes,
            from_image=True,
            expected_checksum=first.mapped[0].checksum,
            **self._served.options,
        )
        load.device, load.model.kv_dtype = self._given.device, self._kv_dtype
        command = client.engine.command(engine_pb2.ToEngine(load=load))
        async with asyncio.timeout(_RUN_S):
            mapped = await command.mapped()
            if mapped[0].manifest != first.mapped[0].manifest:
                self.problems.append(f"{self.name}: the manifest from an image is another one")
            client.lease_ids = [mapped[0].lease_id]
            await image.put(mapped[0].lease_id)
            client.engine.verify(command)
            client.measured = await command.done()
        self.found["from_image_s"] = time.monotonic() - begun
        return client


async def main() -> None:
    given = parse()
    fleet.begin()
    problems: list[str] = []
    found: list[dict[str, Any]] = []
    names = given.cases.split(",")
    few = asyncio.Semaphore(given.together)
    gate = Gate(len(names)) if given.shared else None

    async def one(name: str, folder: Path, shared: harness.Node | None) -> None:
        async with few:
            case = Case(given, name, folder, gate)
            begun = time.monotonic()
            try:
                await case.run(shared)
            except Exception as error:  # the others are still worth their time
                traceback.print_exc()
                if gate is not None:
                    gate.leave()
                case.problems.append(f"{name}: {type(error).__name__}: {' '.join(str(error).split())[:600]}")
            case.found |= {"problems": case.problems, "took_s": round(time.monotonic() - begun, 1)}
            found.append(case.found)
            problems.extend(case.problems)
            runs = {key: (run["partings"], round(run["widest"], 3)) for key, run in case.found.get("runs", {}).items()}
            say(f"== {name}: {'; '.join(case.problems) or 'well'}; {case.found['took_s']} s; {runs}")
            report.write(given.out, "gpu_formats", given.commit, {"cases": found, "problems": problems})

    with tempfile.TemporaryDirectory() as folder:
        async with contextlib.AsyncExitStack() as stack:
            node = None
            if given.shared:
                node = await stack.enter_async_context(harness.node(Path(folder), _SHARED_BYTES, given.device))
            await asyncio.gather(*(one(name, Path(folder), node) for name in names))
    fleet.fail(problems)


if __name__ == "__main__":
    sys.exit(asyncio.run(main()))
