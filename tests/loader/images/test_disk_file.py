"""One image as a file: whole or not there, and never believed when it is damaged."""

import errno
import os
import subprocess
import sys
import textwrap
from dataclasses import replace

import pytest

from loader.copies.threads import Stopped
from loader.images import disk_file, image_memory
from loader.images.disk_file import ALIGN_BYTES, BLOCK_BYTES, Damaged, Header
from services.runtime.checksum import checksum
from testing.patience import PATIENCE_S

TOTAL = BLOCK_BYTES + 12_345
CONTENT = os.urandom(TOTAL)
HEADER = Header(7, 1, TOTAL, checksum(CONTENT), b"manifest" * 1000)


def filled(content=CONTENT, header=HEADER):
    image = image_memory.create("m", header.generation, len(content), header.manifest, header.rank)
    with image.weights() as weights:
        weights[:] = content
    return image


def written(path, moved=lambda nbytes: None):
    image = filled()
    with image.pages() as pages:
        disk_file.write(path, HEADER, pages, 2, moved)
    image.close()
    return path


def read(path, header=HEADER, moved=lambda nbytes: None):
    image = image_memory.create("m", header.generation, header.total_bytes, header.manifest)
    try:
        with image.pages() as pages:
            disk_file.read(path, header, pages, 2, moved)
        with image.weights() as weights:
            return bytes(weights)
    finally:
        image.close()


@pytest.fixture
def path(tmp_path):
    return tmp_path / f"{HEADER.key}.image"


def change(path, at, by=1):
    with open(path, "r+b") as file:
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ by]))


def test_image_file_is_read_as_it_was_written_with_progress_of_every_byte(path):
    told: list[int] = []
    written(path, told.append)
    assert sum(told) == TOTAL + -TOTAL % ALIGN_BYTES
    assert disk_file.read_header(path) == HEADER and os.stat(path).st_size == HEADER.file_bytes
    assert read(path) == CONTENT
    assert os.listdir(path.parent) == [path.name]


def test_image_data_begins_at_a_multiple_of_a_page_whatever_the_manifest():
    for length in (0, 1, 3900, 4096, 100_000):
        assert len(disk_file.encode(replace(HEADER, manifest=bytes(length)))) % ALIGN_BYTES == 0


def test_image_keys_are_equal_only_for_equal_generation_rank_and_layout():
    others = [replace(HEADER, generation=8), replace(HEADER, rank=0), replace(HEADER, manifest=b"other")]
    assert len({HEADER.key, *(other.key for other in others)}) == 4
    assert replace(HEADER, checksum="rows:0").key == HEADER.key


@pytest.mark.parametrize("at", [0, TOTAL // 2, TOTAL - 1])
def test_a_changed_byte_of_the_data_is_found(path, at):
    written(path)
    change(path, HEADER.file_bytes - (TOTAL + -TOTAL % ALIGN_BYTES) + at)
    with pytest.raises(Damaged, match=r"its data has checksum rows:.*, its header says rows:"):
        read(path, disk_file.read_header(path))


@pytest.mark.parametrize(
    ("at", "reason"),
    [
        (0, "no image"),
        (8, "of version 0"),
        (24, "header was changed"),
        (50, "header was changed"),
        (900, "was changed"),
    ],
)
def test_a_changed_byte_of_the_header_is_found(path, at, reason):
    change(written(path), at)
    with pytest.raises(Damaged, match=reason):
        disk_file.read_header(path)


@pytest.mark.parametrize(
    ("size", "reason"),
    [
        (0, "no image"),
        (20, "no image"),
        (100, "truncated"),
        (TOTAL, "bytes where its header says"),
        (-1, "bytes where"),
    ],
)
def test_a_truncated_file_is_found_by_its_header(path, size, reason):
    written(path)
    os.truncate(path, size % os.stat(path).st_size)
    with pytest.raises(Damaged, match=reason):
        disk_file.read_header(path)


def test_a_file_that_shrinks_while_it_is_read_is_damaged(path):
    written(path)
    header = disk_file.read_header(path)
    os.truncate(path, 5 * ALIGN_BYTES)
    with pytest.raises(Damaged, match="it ended at"):
        read(path, header)


def test_a_write_that_is_stopped_leaves_nothing_and_touches_no_older_file(path):
    def stop(nbytes):
        raise Stopped

    written(path)
    with pytest.raises(Stopped):
        written(path, stop)
    assert os.listdir(path.parent) == [path.name] and read(path) == CONTENT


def test_a_folder_without_direct_io_is_written_through_the_page_cache(path, monkeypatch):
    """As on file systems that refuse O_DIRECT."""
    opened = os.open

    def refuse(name, flags, *mode):
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return opened(name, flags, *mode)

    monkeypatch.setattr(os, "open", refuse)
    written(path)
    assert read(path) == CONTENT


PROGRAM = """
import os, resource, signal, sys, time
from pathlib import Path
from loader.images import disk_file
from tests.loader.images.test_disk_file import read, written

def stay(nbytes):
    print("there", flush=True)
    time.sleep(60)
"""


def program(*lines):
    return [sys.executable, "-c", textwrap.dedent(PROGRAM) + "\n".join(lines)]


@pytest.mark.parametrize("ahead", [True, False])
def test_a_disk_that_is_full_leaves_no_part_of_a_file(path, ahead):
    """The limit of a file's size stands in for the end of a disk, noticed `ahead` or half way."""
    limited = program(
        f"ahead = {ahead}",
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)",
        "resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))",
        "disk_file._reserve = disk_file._reserve if ahead else lambda fd, nbytes: None",
        "try:",
        f"    written(Path({str(path)!r}))",
        "except OSError as error:",
        "    print(error.errno)",
    )
    ended = subprocess.run(limited, capture_output=True, text=True, timeout=PATIENCE_S, check=True)
    assert ended.stdout.split() == [str(errno.EFBIG)] and os.listdir(path.parent) == []


@pytest.mark.parametrize("work", ["written(path, stay)", "read(path, moved=stay)"])
def test_a_process_killed_while_it_writes_or_reads_harms_no_file(path, work):
    written(path)
    with subprocess.Popen(program(f"path = Path({str(path)!r})", work), stdout=subprocess.PIPE) as process:
        assert process.stdout.readline() == b"there\n"
        process.kill()
    assert disk_file.read_header(path) == HEADER and read(path) == CONTENT
