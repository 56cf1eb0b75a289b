"""Files that are followed."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from services.errors import Invalid
from services.runtime.watched_files import Followed


def number(path: Path) -> Followed[int]:
    return Followed("number", [str(path)], lambda: int(path.read_text()))


def test_followed_file_change_is_taken_once_and_passed_on(tmp_path: Path) -> None:
    path = tmp_path / "n"
    path.write_text("1")
    followed, told = number(path), []
    followed.on_change(told.append)
    assert (followed.value, followed.refresh()) == (1, False)
    path.write_text("20")
    assert (followed.refresh(), followed.refresh(), followed.value, told) == (True, False, 20, [20])


def test_followed_file_that_cannot_be_used_keeps_the_old_value(tmp_path: Path) -> None:
    path = tmp_path / "n"
    path.write_text("1")
    followed = number(path)
    path.write_text("two")
    assert (followed.refresh(), followed.value) == (False, 1)
    path.unlink()
    assert (followed.refresh(), followed.value) == (False, 1)
    path.write_text("3")
    assert (followed.refresh(), followed.value, followed.revision) == (True, 3, 1)


def test_followed_file_behind_a_replaced_link_is_read_again(tmp_path: Path) -> None:
    """As Kubernetes changes what it mounts."""
    for name in ("1", "2"):
        (tmp_path / name).write_text(name)
    (tmp_path / "n").symlink_to("1")
    followed = number(tmp_path / "n")
    (tmp_path / "new").symlink_to("2")
    os.replace(tmp_path / "new", tmp_path / "n")
    assert (followed.refresh(), followed.value) == (True, 2)


def test_followed_file_written_while_it_is_read_waits_for_the_next_refresh(tmp_path: Path) -> None:
    path = tmp_path / "n"
    path.write_text("1")

    def read() -> int:
        value = int(path.read_text())
        if value == 20:
            path.write_text("300")
        return value

    followed = Followed("number", [str(path)], read)
    path.write_text("20")
    assert (followed.refresh(), followed.value) == (False, 1)
    assert (followed.refresh(), followed.value) == (True, 300)


@pytest.mark.parametrize("text", [None, "one"])
def test_followed_file_unusable_at_the_start_is_refused_in_one_line(tmp_path: Path, text: str | None) -> None:
    path = tmp_path / "n"
    if text is not None:
        path.write_text(text)
    with pytest.raises(Invalid) as refused:
        number(path)
    assert "\n" not in str(refused.value)
