"""One image as a file.

    [0, 4096 n)          magic, version, lengths and digest; facts (JSON); the manifest; zeros
    [4096 n, end)        the weights range, byte for byte, and zeros up to a multiple of 4096

Everything lies at multiples of 4096, so that the file system may move the data by itself (O_DIRECT), without a copy in
the page cache, where it would push out what others have there. The data's checksum is among the facts.
"""

from __future__ import annotations

import errno
import functools
import hashlib
import json
import mmap
import os
import struct
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from loader.copies.threads import Moved
from services.runtime.checksum import Checksum
from services.telemetry import log

_log = log.get(__name__)
ALIGN_BYTES = 4096
BLOCK_BYTES = 8 << 20
"""Bytes of one read or write: large enough for the device, small enough to report progress and stop in between."""
SUFFIX, UNFINISHED = ".image", ".writing"
_MAGIC, _VERSION = b"PRISMIMG", 1
_START = struct.Struct("<8sIIQ16s")
"""The start of a file: magic, version, bytes of facts, bytes of manifest, digest of both."""


class Damaged(Exception):
    """Raised for a file that is no whole image of this version's. The message is one line."""


@dataclass(frozen=True)
class Header:
    """What a file says of its image."""

    generation: int
    """Generation of the checkpoint's files that it was made of."""
    rank: int
    total_bytes: int
    checksum: str
    manifest: bytes

    @property
    def key(self) -> str:
        """Name that two images share only if they are the same bytes: files, rank, and how the engine lays them out
        (which has dtypes and shapes)."""
        layout = hashlib.blake2b(self.manifest, digest_size=8).hexdigest()
        return f"{self.generation:016x}-{self.rank}-{layout}"

    @property
    def file_bytes(self) -> int:
        return len(encode(self)) + _aligned(self.total_bytes)


def encode(header: Header) -> bytes:
    """The bytes of a file before its data."""
    facts = json.dumps(
        {
            "generation": header.generation,
            "rank": header.rank,
            "total_bytes": header.total_bytes,
            "checksum": header.checksum,
        }
    ).encode()
    start = _START.pack(_MAGIC, _VERSION, len(facts), len(header.manifest), _digest(facts + header.manifest))
    whole = start + facts + header.manifest
    return whole.ljust(_aligned(len(whole)), b"\0")


def read_header(path: Path) -> Header:
    """The header of a file. Raises Damaged for what is no whole image, as far as header and size tell, and OSError."""
    with open(path, "rb") as file:
        size = os.fstat(file.fileno()).st_size
        start = file.read(_START.size)
        if len(start) < _START.size or not start.startswith(_MAGIC):
            raise Damaged("it is no image")
        _, version, facts_bytes, manifest_bytes, digest = _START.unpack(start)
        if version != _VERSION:
            raise Damaged(f"it is of version {version}, not {_VERSION}")
        if _START.size + facts_bytes + manifest_bytes > size:
            raise Damaged(f"it is truncated: {size} bytes do not hold its header")
        facts, manifest = file.read(facts_bytes), file.read(manifest_bytes)
    if _digest(facts + manifest) != digest:
        raise Damaged("its header was changed")
    header = Header(**json.loads(facts), manifest=manifest)
    if size != header.file_bytes:
        raise Damaged(f"it has {size} bytes where its header says {header.file_bytes}")
    return header


def write(path: Path, header: Header, pages: memoryview, threads: int, moved: Moved) -> None:
    """Writes an image whose weights, with the rest of their last page, are `pages`. Under `path` there is the whole
    file or none, also when the machine stops. Blocks; raises OSError and what `moved` raises."""
    unfinished = path.with_name(path.name + UNFINISHED)
    try:
        fd = _open(unfinished, os.O_RDWR | os.O_CREAT | os.O_TRUNC)
        try:
            _reserve(fd, header.file_bytes)
            start = encode(header)
            os.pwrite(fd, _as_pages(start), 0)
            _each_block(len(pages), lambda at, end: _write_block(fd, pages[at:end], len(start) + at), threads, moved)
            os.fsync(fd)
        finally:
            os.close(fd)
        os.rename(unfinished, path)
        _sync_folder(path.parent)
    except BaseException:
        unfinished.unlink(missing_ok=True)
        raise


def read(path: Path, header: Header, pages: memoryview, threads: int, moved: Moved) -> None:
    """Fills `pages` with the file's data and checks that it is what was once written. Blocks; raises Damaged, OSError
    and what `moved` raises."""
    begin = len(encode(header))
    seen = Checksum()

    def read_block(at: int, end: int) -> Checksum:
        _read_block(fd, pages[at:end], begin + at)
        part = Checksum()
        part.add(at, pages[at : min(end, header.total_bytes)])
        return part

    fd = _open(path, os.O_RDONLY)
    try:
        _each_block(len(pages), read_block, threads, moved, seen.join)
    finally:
        os.close(fd)
    if seen.text() != header.checksum:
        raise Damaged(f"its data has checksum {seen.text()}, its header says {header.checksum}")


def _each_block(
    nbytes: int,
    work: Callable[[int, int], Checksum | None],
    threads: int,
    moved: Moved,
    each: Callable[[Checksum], None] = lambda part: None,
) -> None:
    """Does `work` for every block, several at a time; returns, or raises, when no thread is at work any more."""
    under_way: deque[tuple[int, Future[Checksum | None]]] = deque()

    def finish_one() -> None:
        size, block = under_way.popleft()
        part = block.result()
        if part is not None:
            each(part)
        moved(size)

    with ThreadPoolExecutor(threads, thread_name_prefix="disk") as pool:
        try:
            for at in range(0, nbytes, BLOCK_BYTES):
                end = min(at + BLOCK_BYTES, nbytes)
                under_way.append((end - at, pool.submit(work, at, end)))
                if len(under_way) > 2 * threads:
                    finish_one()
            while under_way:
                finish_one()
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def _write_block(fd: int, block: memoryview, offset: int) -> None:
    while block:
        count = os.pwrite(fd, block, offset)
        block, offset = block[count:], offset + count


def _read_block(fd: int, block: memoryview, offset: int) -> None:
    while block:
        count = os.preadv(fd, [block], offset)
        if count == 0:
            raise Damaged(f"it ended at {offset}")
        block, offset = block[count:], offset + count


def _open(path: Path, flags: int) -> int:
    try:
        return os.open(path, flags | os.O_DIRECT, 0o600)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
    _tell_indirect(path.parent)
    return os.open(path, flags, 0o600)


@functools.cache
def _tell_indirect(folder: Path) -> None:
    _log.warning("no direct I/O in this folder: images pass through the page cache", folder=str(folder))


def _reserve(fd: int, nbytes: int) -> None:
    """Reserves the file's blocks: a disk that is too full is found out before anything was written, and the blocks lie
    together."""
    try:
        os.posix_fallocate(fd, 0, nbytes)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
            raise


def _as_pages(data: bytes) -> memoryview:
    """A copy of `data` that begins where a page does, as O_DIRECT wants it."""
    memory = mmap.mmap(-1, len(data))
    memory[:] = data
    return memoryview(memory)


def _sync_folder(folder: Path) -> None:
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _digest(data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=16).digest()


def _aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGN_BYTES) * ALIGN_BYTES
