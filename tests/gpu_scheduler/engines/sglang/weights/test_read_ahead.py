"""Tensors of safetensors files, read ahead by several threads into a buffer that goes round."""

from __future__ import annotations

import json
import os
import random
import shutil
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
import pytest_asyncio
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from gpu_scheduler.engines.sglang.memory import host_buffer
from gpu_scheduler.engines.sglang.memory.host_buffer import HostBuffer
from gpu_scheduler.engines.sglang.weights import read_ahead
from gpu_scheduler.engines.sglang.weights.read_ahead import OtherTypes, ReadAhead, or_as_ever
from protos import engine_pb2
from testing.engines.harness import Node, load, node
from tests.gpu_scheduler.engines.sglang.checkpoints import CONTEXT
from tests.gpu_scheduler.engines.sglang.shared import Engines

CPU = torch.device("cpu")
TYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.int64, torch.uint8, torch.bool)


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that small tensors are read by several threads too."""
    monkeypatch.setattr(read_ahead, "PIECE_BYTES", 1000)


def shards(folder: Path, count: int = 3, each: int = 20) -> list[str]:
    """Files of tensors of many types and sizes, one of them empty and one a scalar."""
    chance, files = random.Random(7), []
    generator = torch.Generator().manual_seed(7)
    for number in range(count):
        tensors = {}
        for index in range(each):
            shape = (chance.randrange(1, 60), chance.randrange(1, 60))
            drawn = torch.randint(0, 2**31, shape, generator=generator)
            tensors[f"layers.{number}.{index}"] = drawn.to(TYPES[index % len(TYPES)])
        tensors[f"layers.{number}.empty"] = torch.empty(0, 4)
        tensors[f"layers.{number}.scalar"] = torch.tensor(1.5 + number)
        files.append(str(folder / f"model-{number}.safetensors"))
        save_file(tensors, files[-1])
    return files


@contextmanager
def reader(nbytes: int, threads: int = 4) -> Iterator[ReadAhead]:
    reading = ReadAhead(HostBuffer(nbytes, CPU), threads)
    try:
        yield reading
    finally:
        reading.close()


def same(tensor: torch.Tensor, other: torch.Tensor) -> bool:
    """In type, shape and every bit."""
    return (
        tensor.dtype == other.dtype
        and tensor.shape == other.shape
        and tensor.contiguous().flatten().view(torch.uint8).equal(other.contiguous().flatten().view(torch.uint8))
    )


def largest(files: list[str]) -> int:
    return max(tensor.nbytes for _, tensor in by_safetensors(files))


def by_safetensors(files: list[str]) -> Iterator[tuple[str, torch.Tensor]]:
    for file in files:
        with safe_open(file, framework="pt") as opened:
            for name in opened.offset_keys():
                yield name, opened.get_tensor(name)


@pytest.mark.parametrize("threads", [1, 4])
@pytest.mark.parametrize("nbytes", [1 << 20, 40_000, 1])
def test_tensors_are_those_of_safetensors_bit_for_bit_in_the_order_of_the_files(
    tmp_path: Path, nbytes: int, threads: int
) -> None:
    """With a buffer for all of them, one for a few, and none."""
    files = shards(tmp_path)[::-1]
    with reader(nbytes, threads) as reading:
        found = 0
        for (name, tensor), (expected_name, expected) in zip(
            reading.tensors(files), by_safetensors(files), strict=True
        ):
            assert name == expected_name and same(tensor, expected), name
            found += tensor.nbytes
        assert reading.nbytes == found


def test_tensors_that_are_kept_keep_their_values_whatever_is_read_after_them(tmp_path: Path) -> None:
    files = shards(tmp_path)
    chance = random.Random(3)
    with reader(40_000) as reading:
        kept = {name: tensor for name, tensor in reading.tensors(files) if chance.random() < 0.7}
    expected = dict(by_safetensors(files))
    assert len(kept) > 30 and all(same(tensor, expected[name]) for name, tensor in kept.items())


def test_a_view_of_a_tensor_keeps_its_memory_too(tmp_path: Path) -> None:
    files = shards(tmp_path)
    expected = dict(by_safetensors(files))
    with reader(largest(files)) as reading:
        kept = {}
        for name, tensor in reading.tensors(files):
            if tensor.dim() == 2 and tensor.shape[0] > 2:
                kept[name] = tensor.narrow(0, 1, 2)
            del tensor
    assert all(same(view, expected[name].narrow(0, 1, 2)) for name, view in kept.items())


def test_buffer_is_whole_again_for_another_list_of_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = shards(tmp_path)
    monkeypatch.setattr(read_ahead.np, "empty", _not_here)
    with reader(sum(os.path.getsize(file) for file in files)) as reading:
        for _ in range(3):
            names = [name for name, _ in reading.tensors(files)]
            assert names == [name for name, _ in by_safetensors(files)]


def _not_here(*_: object, **__: object) -> None:
    raise AssertionError("memory beside the buffer")


def test_reading_holds_its_buffer_and_nothing_else_while_no_tensor_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With room for the tensor that is looked at, and the largest after it, wherever they lie."""
    files = shards(tmp_path, count=6)
    buffer = 4 * largest(files)
    assert buffer < sum(os.path.getsize(file) for file in files) / 3
    monkeypatch.setattr(read_ahead.np, "empty", _not_here)
    with reader(buffer) as reading:
        for name, tensor in reading.tensors(files):
            assert tensor.numel() or name.endswith("empty")
            del tensor


def test_tensors_that_are_all_kept_get_memory_beside_the_buffer_one_at_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files, made = shards(tmp_path), []
    empty = read_ahead.np.empty
    monkeypatch.setattr(read_ahead.np, "empty", lambda *a, **k: made.append(1) or empty(*a, **k))
    kept, before = [], 0
    with reader(20_000) as reading:
        for _, tensor in reading.tensors(files):
            kept.append(tensor)
            assert len(made) - before <= 1
            before = len(made)
    assert 20 < len(made) < len(kept)


def test_a_file_cut_short_is_refused_before_any_tensor_with_the_librarys_words(tmp_path: Path) -> None:
    files = shards(tmp_path)
    os.truncate(files[-1], os.path.getsize(files[-1]) - 100)
    with pytest.raises(SafetensorError) as theirs, safe_open(files[-1], framework="pt"):
        pass
    with reader(1 << 20) as reading, pytest.raises(SafetensorError) as ours:
        next(reading.tensors(files))
    assert str(ours.value) == str(theirs.value)


def test_a_file_that_is_cut_while_it_is_read_fails_and_says_where(tmp_path: Path) -> None:
    files = shards(tmp_path, count=1, each=40)
    size = os.path.getsize(files[0])
    names = set()
    with reader(largest(files) + 1) as reading, pytest.raises(OSError, match=r"model-0\.safetensors ends at byte \d+"):
        for name, _ in reading.tensors(files):
            os.truncate(files[0], size // 2)
            names.add(name)
    assert 0 < len(names) < 42


def test_reading_that_is_not_finished_leaves_no_thread_and_no_file_once_closed(tmp_path: Path) -> None:
    files = shards(tmp_path)
    assert reading_here(tmp_path) == (0, 0)
    with reader(20_000) as reading:
        tensors = reading.tensors(files)  # kept, as the traceback of what failed keeps it
        next(tensors)
        assert reading_here(tmp_path) == (4, len(files))
    assert reading_here(tmp_path) == (0, 0)


def reading_here(folder: Path) -> tuple[int, int]:
    """Threads that read, and open files below a folder: others of this process go when other tests' rubbish does."""
    threads = [thread for thread in threading.enumerate() if thread.name.startswith("read ")]
    opened = [path for path in open_files() if path.startswith(f"{folder}/")]
    return len(threads), len(opened)


def open_files() -> Iterator[str]:
    for fd in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):  # the listing's own, at the least
            yield os.readlink(f"/proc/self/fd/{fd}")


def test_types_that_only_safetensors_knows_are_left_to_it(tmp_path: Path) -> None:
    header = json.dumps({"scales": {"dtype": "F8_E8M0", "shape": [4], "data_offsets": [0, 4]}}).encode()
    other = tmp_path / "other.safetensors"
    other.write_bytes(len(header).to_bytes(8, "little") + header + bytes(4))
    files = [*shards(tmp_path), str(other)]
    with reader(1 << 20) as reading:
        with pytest.raises(OtherTypes, match="other.safetensors: scales is F8_E8M0"):
            next(reading.tensors(files))
        asked = []

        def original(names: list[str], sizes: int) -> Iterator[tuple[str, torch.Tensor]]:
            asked.append((names, sizes))
            yield "a", torch.ones(1)

        assert [name for name, _ in or_as_ever(reading, original, files, 3)] == ["a"] and asked == [(files, 3)]
        assert [name for name, _ in or_as_ever(None, original, files, 4)] == ["a"]


def test_buffer_place_is_used_again_only_after_the_device_was_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """A copy that was only asked for may still read there."""
    waits = []
    monkeypatch.setattr(host_buffer.torch.cuda, "synchronize", waits.append)
    monkeypatch.setattr(host_buffer.torch.cuda, "cudart", _Cuda)
    buffer = HostBuffer(1000, CPU)
    buffer.registered = True  # as on a GPU
    first = buffer.take(600)
    assert first is not None and buffer.take(600) is None and not waits
    del first
    assert buffer.take(600) is not None and waits == [CPU]
    buffer.close()
    assert not buffer.registered


def test_buffer_place_returned_during_a_wait_for_the_device_has_a_wait_of_its_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Another thread may have asked for its copy after the wait began."""
    buffer = HostBuffer(1024, CPU)
    first, second = buffer.take(512), buffer.take(512)
    held, waits = [second], []

    def wait(device: torch.device) -> None:
        waits.append(device)
        held.clear()

    monkeypatch.setattr(host_buffer.torch.cuda, "synchronize", wait)
    buffer.registered = True  # as on a GPU
    assert first is not None and second is not None
    del first, second
    third = buffer.take(512)
    assert third is not None and len(waits) == 1
    assert buffer.take(512) is not None and len(waits) == 2
    buffer.registered = False


class _Cuda:
    def cudaHostUnregister(self, address: int) -> int:
        assert address
        return 0


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def engines() -> AsyncIterator[Engines]:
    """They say what they read, to whoever looks while they start."""
    shared = Engines("--log-level", "info")
    yield shared
    await shared.close()


@pytest.mark.sglang
@pytest.mark.asyncio(loop_scope="module")
async def test_weights_of_an_engine_are_the_same_with_and_without_reading_ahead(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], engines: Engines, models: dict[str, Path]
) -> None:
    """The buffer holds a few of the tensors, and one is larger."""
    async with node(tmp_path) as at, engines.one() as end:
        await at.book("llama")
        checksums, read = [], []
        files = [str(path) for path in models["llama"].glob("*.safetensors")]
        for threads in (0, 3):
            options = {"read_threads": threads, "read_ahead_bytes": 400_000}
            mapped, _ = await end.hold(load(at, "llama", models["llama"], context_tokens=CONTEXT, **options))
            checksums.append(mapped.checksum)
            await end.do(unload=engine_pb2.Unload())
            said = capfd.readouterr().err.splitlines()
            lines = [json.loads(line) for line in said if "checkpoint read" in line]
            assert [line["model"] for line in lines] == ["llama"], "several engines log to one place"
            read += [line["ahead_bytes"] for line in lines]
        assert checksums[0] and len(set(checksums)) == 1
        assert read == [0, sum(tensor.nbytes for _, tensor in by_safetensors(files))]


@pytest.mark.sglang
@pytest.mark.asyncio(loop_scope="module")
async def test_load_of_cut_files_fails_and_an_engine_killed_while_reading_leaves_no_memory(
    tmp_path: Path, engines: Engines, models: dict[str, Path]
) -> None:
    cut = tmp_path / "cut"
    shutil.copytree(models["llama"], cut)
    weights = cut / "model.safetensors"
    os.truncate(weights, weights.stat().st_size - 1000)
    options = {"read_threads": 2, "read_ahead_bytes": 400_000}
    async with node(tmp_path) as at:
        await at.book("llama")
        async with engines.one() as end:
            failed = await end.fail(load=load(at, "llama", cut, context_tokens=CONTEXT, **options))
            assert failed.model_at_fault and str(tmp_path) not in failed.reason and "incomplete" in failed.reason
            assert await at.leased_bytes() == 0
            end.send(load=load(at, "llama", models["llama"], context_tokens=CONTEXT, **options))
            await end.until(lambda: end.step == "reading checkpoint")
            assert await at.leased_bytes() > 0
            end.process.kill()
            await end.process.wait()
            await at.until(lambda: _nothing_leased(at))
        async with engines.one() as end:
            await end.hold(load(at, "llama", models["llama"], context_tokens=CONTEXT, **options))


async def _nothing_leased(at: Node) -> bool:
    return await at.leased_bytes() == 0
