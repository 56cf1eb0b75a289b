import asyncio
import sys

import pytest

from deploy.local import bundled

PROGRAM = """import pathlib, sys, time
pathlib.Path({folder!r}).mkdir()
{then}
"""


@pytest.fixture
def word(monkeypatch, tmp_path):
    """Gives a word to a folder that a program makes, and goes on with `then`."""

    def give(then=""):
        program, folder = tmp_path / "program.py", tmp_path / "folder"
        program.write_text(PROGRAM.format(folder=str(folder), then=then))
        interpreter = tmp_path / "python"
        interpreter.write_text(f"#!/bin/sh\nexec {sys.executable} {program}\n")
        interpreter.chmod(0o755)
        monkeypatch.setattr(bundled, "BUNDLED", {"word": folder})
        monkeypatch.setattr(sys, "executable", str(interpreter))
        return folder

    return give


async def test_bundled_folders_are_made_only_if_named(word, tmp_path):
    folder, stopping = word(), asyncio.get_running_loop().create_future()
    await bundled.make({tmp_path / "other"}, stopping)
    assert not folder.exists()
    await bundled.make({tmp_path / "other", folder}, stopping)
    assert folder.exists()


async def test_ctrl_c_ends_the_process_that_makes_a_bundled_folder(word):
    folder, stopping = word("time.sleep(600)"), asyncio.get_running_loop().create_future()
    making = asyncio.get_running_loop().create_task(bundled.make({folder}, stopping))
    while not folder.exists():
        await asyncio.sleep(0.01)
    stopping.set_result(None)
    await making
