"""Lines through the curves of a long run, and samples of a process."""

import gc
import mmap
import os

import pytest

from benchmarks.soak import fits, models
from testing.chaos import curves


def test_a_line_finds_the_growth_of_an_hour_and_leaves_the_warm_up_out():
    times = [15.0 * i for i in range(240)]
    warm_up = sum(at < 600 for at in times)
    grows = [1e6 if at < 600 else 100 + 2 * at / 3600 for at in times]
    found = fits(times, {"grows": grows, "flat": [7.0] * 240, "short": [1.0] * 30}, 600)
    assert set(found) == {"grows", "flat"}, "a curve with holes has no line"
    assert found["grows"]["slope_per_hour"] == pytest.approx(2)
    assert found["grows"]["most"] == grows[-1] and found["grows"]["least"] == grows[warm_up]
    assert found["flat"]["slope_per_hour"] == found["flat"]["error_per_hour"] == 0
    assert (found["flat"]["first"], found["flat"]["last"]) == (7, 7)


def test_what_jumps_about_a_level_has_an_error_larger_than_its_slope():
    times = [15.0 * i for i in range(100)]
    line = curves.fit(times, [10.0 + (i % 2) for i in range(100)])
    assert abs(line.slope_per_hour) < line.error_per_hour


def test_a_sample_counts_memory_and_descriptors_of_a_process():
    gc.collect()  # or what other tests left in cycles goes meanwhile
    before = curves.sample(os.getpid())
    fds = [os.memfd_create("x") for _ in range(5)]
    # Memory of its own: an allocator may have as much left of other tests.
    held = mmap.mmap(-1, 16 << 20, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    held.write(os.urandom(1 << 20) * 16)
    after = curves.sample(os.getpid())
    assert after["descriptors"] == before["descriptors"] + 5
    assert after["own_bytes"] - before["own_bytes"] > len(held) / 2
    assert after["rss_bytes"] >= after["own_bytes"] and after["threads"] >= 1
    held.close()
    for fd in fds:
        os.close(fd)


def test_a_process_that_has_gone_has_no_sample():
    pid = os.fork()
    if pid == 0:
        os._exit(0)
    os.waitpid(pid, 0)
    with pytest.raises((FileNotFoundError, ProcessLookupError)):
        curves.sample(pid)


def test_ten_models_have_ten_names():
    assert len(models()) == 10
