"""Images: out of a GPU's extents and into them."""

import mmap
import os
import random
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest

from balloond.backends import maker
from loader.client import LoaderClient
from loader.copies.threads import Stopped
from loader.policy.chunks import pairs, plan
from loader.transfers import Transfers
from loader.transfers.base import Borrowed
from protos import engine_pb2
from services.errors import Unmet
from services.rpc import rpc
from services.runtime.checksum import checksum as checksum_of
from tests.balloond.conftest import ROOT, TIMEOUT_S
from tests.gpu.conftest import DEVICE, MIB
from tests.loader import checkpoint_files

SIZES = [64 * MIB, 64 * MIB, 6 * MIB]
TOTAL = 130 * MIB + 4321


@pytest.fixture
def made():
    """New extents of a device."""
    kept = []

    def new(device, sizes):
        make = maker(device)
        kept.append([Borrowed(number, size, make.create(size), device) for number, size in enumerate(sizes)])
        return kept[-1]

    yield new
    for extents in kept:
        for extent in extents:
            os.close(extent.fd)


@pytest.fixture
def extents(made):
    return made(DEVICE, SIZES)


def devices():
    """All that the driver shows."""
    from balloond.backends import cuda_hardware

    return [f"cuda:{index}" for index in range(cuda_hardware.count())]


@pytest.fixture
def image():
    """New host memory for images."""
    made = []

    def new():
        fd = os.memfd_create("image")
        os.ftruncate(fd, TOTAL)
        memory = mmap.mmap(fd, TOTAL)
        os.close(fd)
        made.append((memory, memoryview(memory)))
        return made[-1][1]

    yield new
    for memory, view in made:
        view.release()
        memory.close()


@pytest.mark.parametrize("chunk_bytes", [32 * MIB, 8 * MIB, 5_000_001])
def test_image_copied_into_extents_and_back_is_the_same_byte_for_byte(extents, image, monkeypatch, chunk_bytes):
    from loader.transfers import pinned

    monkeypatch.setattr(pinned, "_PIECE_BYTES", 48 * MIB)
    transfers = Transfers()
    transfer = transfers.of(DEVICE)
    content = random.Random(1).randbytes(TOTAL)
    there, back = image(), image()
    there[:] = content
    steps = plan(SIZES, TOTAL, chunk_bytes)
    seen = []
    transfer.into(extents, there, steps, seen.append)()
    assert seen == list(steps)
    there[:] = bytes(TOTAL)
    transfer.out_of(extents, back, steps, lambda chunk: None)()
    assert back == content
    for view in (there, back):
        transfers.forget(view)


def test_a_cancelled_copy_is_over_when_it_returns(extents, image):
    transfers = Transfers()
    transfer = transfers.of(DEVICE)
    view = image()
    done = []

    def stop(chunk):
        done.append(chunk)
        if len(done) == 3:
            raise Stopped

    with pytest.raises(Stopped):
        transfer.into(extents, view, plan(SIZES, TOTAL, MIB), stop)
    assert len(done) == 3
    # Nothing is mapped or registered in a way that a copy after it would mind.
    transfer.into(extents, view, plan(SIZES, TOTAL, MIB), lambda chunk: None)()
    transfers.forget(view)


def test_extent_of_another_size_than_stated_is_an_error(extents, image):
    transfers = Transfers()
    wrong = [extents[0], Borrowed(9, 32 * MIB, extents[1].fd, DEVICE)]
    with pytest.raises(OSError, match="cuMemMap"):
        transfers.of(DEVICE).into(wrong, image(), plan([64 * MIB, 32 * MIB], 90 * MIB, MIB), lambda chunk: None)


def test_links_to_a_gpu_used_together_fill_and_read_it_byte_for_byte(extents, image):
    transfers = Transfers(devices())
    if len(transfers.paths()[DEVICE]) < 2:
        pytest.skip(f"no other GPU reaches {DEVICE}")
    content = random.Random(2).randbytes(TOTAL)
    there, back = image(), image()
    there[:] = content
    steps = plan(SIZES, TOTAL, MIB)
    seen = []
    transfers.of(DEVICE).into(extents, there, steps, seen.append)()
    assert sorted(seen, key=lambda chunk: chunk.at) == list(steps)
    transfers.of(DEVICE).out_of(extents, back, steps, lambda chunk: None)()
    assert back == content
    for view in (there, back):
        transfers.forget(view)


def test_gpus_that_are_loaded_at_once_have_every_byte(made, image):
    """Each over its own link and with its extents mapped for itself, but for what was mapped before the others
    began."""
    names = devices()[:4]
    if len(names) < 2:
        pytest.skip("there is one GPU")
    transfers = Transfers(names)
    steps = plan(SIZES, TOTAL, MIB)
    extents, images = [made(name, SIZES) for name in names], [image() for _ in names]
    contents = [random.Random(number).randbytes(TOTAL) for number in range(len(names))]
    for view, content in zip(images, contents, strict=True):
        view[:] = content

    def load(number):
        return transfers.of(names[number]).into(extents[number], images[number], steps, lambda chunk: None)

    with ThreadPoolExecutor(len(names)) as threads:
        for tidy in list(threads.map(load, range(len(names)))):
            tidy()
    back = image()
    for name, there, content in zip(names, extents, contents, strict=True):
        transfers.of(name).out_of(there, back, steps, lambda chunk: None)()
        assert back == content
    for view in (*images, back):
        transfers.forget(view)


@pytest.mark.parametrize("number", [0, 1])
def test_weights_go_from_gpu_to_gpu_and_within_one(extents, made, image, number):
    if number >= len(devices()):
        pytest.skip("there is one GPU")
    transfers = Transfers()
    target, sizes = devices()[number], [32 * MIB, 128 * MIB]
    targets = made(target, sizes)
    content = random.Random(3).randbytes(TOTAL)
    there, back = image(), image()
    there[:] = content
    transfers.of(DEVICE).into(extents, there, plan(SIZES, TOTAL, 8 * MIB), lambda chunk: None)()
    try:
        transfers.of(DEVICE).between(extents, targets, pairs(SIZES, sizes, TOTAL, 5_000_001), lambda pair: None)()
    except Unmet:
        pytest.skip(f"{DEVICE} does not reach {target}")
    transfers.of(target).out_of(targets, back, plan(sizes, TOTAL, 8 * MIB), lambda chunk: None)()
    assert back == content
    for view in (there, back):
        transfers.forget(view)


class Loader:
    """A loader process with one model, "m"."""

    def __init__(self, node, folder):
        self.folder = folder
        self.address = f"unix:{folder}/l.sock"
        checkpoint_files.write(folder / "m")
        (folder / "c.toml").write_text('[[model]]\nname = "m"\npath = "m"\n')
        (folder / "l.toml").write_text(
            f'name = "loader"\nlisten = "{self.address}"\ncatalogue = "{folder}/c.toml"\n'
            f'keeper = "{node.keeper_path}"\nhandoff = "{node.handoff}"\nhost_capacity_bytes = {1 << 30}\n'
        )

    async def start(self):
        log = open(self.folder / "log", "ab")
        command = [sys.executable, "-m", "loader", "--config", str(self.folder / "l.toml")]
        self.process = subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=log)
        assert await rpc.healthy(self.address, TIMEOUT_S), (self.folder / "log").read_text()
        self.client = LoaderClient(self.address)

    async def generation(self):
        async for catalogue in self.client.watch():
            if catalogue is not None and catalogue.entries:
                return catalogue.entries[0].model.generation

    async def kill(self):
        await self.client.close()
        self.process.kill()
        self.process.wait()


async def test_weights_leave_with_their_engine_and_come_back_from_the_image(node, child, tmp_path):
    """Through all processes: keeper, balloond, loader, and an engine that is only its memory."""
    total = 2 * 64 * MIB + 2 * MIB
    await node.book("m", weights=3 * 64 * MIB)
    engine = child("m")
    assert await engine.asked("grow_weights", total) == str(total)
    engine.ask("fill_weights", 0x5A)
    tensor = engine_pb2.Manifest.Tensor(name="w", shape=[total], stride=[1], dtype="uint8")
    manifest = engine_pb2.Manifest(tensors=[tensor], total_bytes=total).SerializeToString()
    checksum = checksum_of(bytes([0x5A]) * total)
    lease = engine.ask("lease_id")
    loader = Loader(node, tmp_path)
    await loader.start()
    try:
        told = []
        generation = await loader.generation()
        saved = await loader.client.save_image("m", generation, lease, manifest, checksum, on_progress=told.append)
        assert saved.checksum == checksum
        assert any(0 < progress.done < total for progress in told)
        engine.ask("leave_weights")
        assert await engine.asked("grow_weights", total) == str(total)
        assert engine.ask("bytes_of_weights") == "0"
        await loader.client.load_image("m", generation, lease, manifest)
        assert engine.ask("bytes_of_weights") == "90"
        # A loader that comes back has the image still, and its descriptors are CUDA's again.
        await loader.kill()
        await loader.start()
        engine.ask("fill_weights", 1)
        await loader.client.load_image("m", await loader.generation(), lease, manifest)
        assert engine.ask("bytes_of_weights") == "90"
        engine.ask("leave_weights")
        await node.until(lambda device: device.leased_bytes == 0)
    finally:
        await loader.kill()
