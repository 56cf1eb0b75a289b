"""How far long work is, on a terminal and elsewhere."""

from __future__ import annotations

import os
import pty
import re
import termios

import pytest

from services.runtime.progress import Far, ProgressMeter


@pytest.mark.parametrize(
    ("far", "amount"),
    [
        (Far("reading", 1.2e9, 16e9, per_s=500e6), "1.2 GB of 16.0 GB, 500 MB/s, 30 s left"),
        (Far("reading", 1.2e9, 16e9, per_s=500e6, left_s=7), "1.2 GB of 16.0 GB, 500 MB/s, 7 s left"),
        (Far("reading", 0, 16e9), "0 B of 16.0 GB"),
        (Far("compiling", 3, 12, "kernels", per_s=0.5), "3 of 12 kernels, 18 s left"),
        (Far("compiling", 3, 0, "kernels"), "3 kernels so far"),
        (Far("verifying"), ""),
    ],
)
def test_amount_has_what_is_known(far: Far, amount: str) -> None:
    assert far.amount() == amount


def _read_all(ours: int) -> str:
    """All that was written to a pseudo-terminal whose other end is closed; the kernel hands it over in parts."""
    parts: list[bytes] = []
    try:
        while part := os.read(ours, 1 << 16):
            parts.append(part)
    except OSError:  # EIO: the other end is closed, and nothing is left
        pass
    finally:
        os.close(ours)
    return b"".join(parts).decode()


def test_meter_draws_a_bar_on_a_terminal_and_a_new_one_for_each_step(monkeypatch: pytest.MonkeyPatch) -> None:
    ours, theirs = pty.openpty()
    termios.tcsetwinsize(theirs, (24, 100))
    with open(theirs, "w") as terminal:
        monkeypatch.setattr("sys.stderr", terminal)
        with ProgressMeter("prism", lambda line: pytest.fail(line)) as meter:
            meter.show(Far("reading", 0, 4e9))
            meter.show(Far("reading", 1e9, 4e9, per_s=1e9))
            meter.show(Far("verifying"))
    drawn = _read_all(ours)
    assert "prism: reading   0% |" in drawn and "prism: reading  25% |" in drawn
    assert "1.0 GB of 4.0 GB, 1.0 GB/s, 3 s left" in drawn and "prism: verifying, 00:00" in drawn
    assert drawn.rpartition("verifying")[2].rstrip("\r").endswith(" "), "nothing of it is left"


@pytest.mark.parametrize(("columns", "bar"), [(99, 24), (75, 14), (60, 0)])
def test_bar_leaves_a_narrow_terminal_to_its_words(monkeypatch: pytest.MonkeyPatch, columns: int, bar: int) -> None:
    ours, theirs = pty.openpty()
    termios.tcsetwinsize(theirs, (24, columns))
    with open(theirs, "w") as terminal:
        monkeypatch.setattr("sys.stderr", terminal)
        with ProgressMeter("prism", lambda line: pytest.fail(line)) as meter:
            meter.show(Far("reading", 1e9, 4e9, per_s=1e9))
    drawn = _read_all(ours)
    assert "1.0 GB of 4.0 GB, 1.0 GB/s, 3 s left" in drawn
    assert [len(each) for each in re.findall(r"\|(.*)\|", drawn)] == ([bar] if bar else [])


def test_meter_says_lines_where_there_is_no_terminal() -> None:
    said: list[str] = []
    with ProgressMeter("prism", said.append, every_s=0.0) as meter:
        meter.show(Far("reading", 1e9, 4e9))
        meter.show(Far("verifying"))
    assert said == ["reading, 1.0 GB of 4.0 GB", "verifying"]
    with ProgressMeter("prism", said.append, every_s=1e9) as meter:
        meter.show(Far("copying", 1e9, 4e9))
    assert len(said) == 2, "not before its time"
