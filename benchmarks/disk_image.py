"""An image's way to local disk and back, beside what the disk itself gives.

    python benchmarks/disk_image.py                       # 1 GiB, in a folder of the temporary files
    python benchmarks/disk_image.py --folder /mnt/nvme --gib 16

    write   host memory -> file, as the loader does after a save: reserved, written, synced, renamed
    read    file -> new host memory, with its checksum, as the loader does for a model that only the disk has
    plain   the same file, read in order by one thread with O_DIRECT in the same blocks into memory that is there
    many    the same by as many threads as the loader has: what the disk gives at most
    new     the same into new memory, whose pages the kernel has to find and clear

Writes come first, because what a disk still does after one shows in whatever follows; then one of each read in turn, so
that a busy neighbour is in all of them.
"""

from __future__ import annotations

import mmap
import os
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import _report
from loader.images import disk_file, image_memory
from loader.images.disk_file import BLOCK_BYTES, Header
from loader.images.image_memory import Image
from services.runtime.checksum import checksum

GIB = 1 << 30


def seconds(work: Callable[[], None]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def write(path: Path, header: Header, image: Image, threads: int) -> None:
    with image.pages() as pages:
        disk_file.write(path, header, pages, threads, lambda nbytes: None)


def read(path: Path, threads: int) -> Image:
    header = disk_file.read_header(path)
    image = image_memory.create("m", header.generation, header.total_bytes, header.manifest)
    with image.pages() as pages:
        disk_file.read(path, header, pages, threads, lambda nbytes: None)
    return image


def plain(path: Path, memory: mmap.mmap, threads: int) -> None:
    """Every block of the file that is one whole."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECT)

    def block(at: int) -> None:
        with memoryview(memory) as whole, whole[at : at + BLOCK_BYTES] as part:
            assert os.preadv(fd, [part], at) == len(part)

    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(block, range(0, len(memory), BLOCK_BYTES)))
    os.close(fd)


def plain_into_new(path: Path, total: int, threads: int) -> float:
    image = image_memory.create("m", 1, total, b"")
    taken = seconds(lambda: plain(path, image.memory, threads))
    image.close()
    return taken


def main() -> None:
    parser = _report.arguments("disk_image", __doc__ or "")
    parser.add_argument("--folder", type=Path, help="on the disk in question (default: a new temporary folder)")
    parser.add_argument("--gib", type=float, default=1.0)
    parser.add_argument("--threads", type=int, default=4, help="of loader/images/disk.py")
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    total = int(options.gib * GIB) // BLOCK_BYTES * BLOCK_BYTES
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        image = image_memory.create("m", 1, total, b"manifest")
        with image.weights() as weights:
            for at in range(0, total, BLOCK_BYTES):
                weights[at : at + BLOCK_BYTES] = os.urandom(BLOCK_BYTES)
            header = Header(1, 0, total, checksum(weights), b"manifest")
        path = Path(folder) / f"{header.key}{disk_file.SUFFIX}"
        memory = mmap.mmap(-1, total)
        memory.write(bytes(total))
        taken: dict[str, list[float]] = {"write": [], "read": [], "plain": [], "many": [], "new": []}
        for _ in range(options.rounds):
            taken["write"].append(seconds(lambda: write(path, header, image, options.threads)))
        image.close()
        for _ in range(options.rounds):
            taken["plain"].append(seconds(lambda: plain(path, memory, 1)))
            began = time.perf_counter()
            there = read(path, options.threads)
            taken["read"].append(time.perf_counter() - began)
            there.close()
            taken["many"].append(seconds(lambda: plain(path, memory, options.threads)))
            taken["new"].append(plain_into_new(path, total, options.threads))
    gb_s = {name: [total / each / 1e9 for each in samples] for name, samples in taken.items()}
    read_of = {
        name: [ours / theirs for ours, theirs in zip(gb_s["read"], gb_s[name], strict=True)]
        for name in ("plain", "many", "new")
    }
    _report.table(
        ["", "GB/s p50", "min", "max"],
        [[name, _report.quantile(each, 0.5), min(each), max(each)] for name, each in gb_s.items()],
    )
    for name, ratios in read_of.items():
        print(f"read of {name}: {_report.quantile(ratios, 0.5):.2f}")
    _report.write(
        options.out,
        "disk_image",
        {
            "bytes": total,
            "threads": options.threads,
            "block_bytes": BLOCK_BYTES,
            "gb_s": {name: _report.spread(each) for name, each in gb_s.items()},
            "read_of": {name: _report.spread(ratios) for name, ratios in read_of.items()},
            "seconds": taken,
        },
    )


if __name__ == "__main__":
    main()
