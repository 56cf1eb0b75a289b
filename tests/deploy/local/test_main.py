import asyncio
import fcntl
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]


async def start(*arguments):
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "deploy.local", *arguments, cwd=ROOT,
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    out, err = await process.communicate()
    return process.returncode, (out + err).decode()


async def test_a_second_system_in_the_same_folder_is_refused_in_one_line(tmp_path):
    with open(tmp_path / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        status, out = await start("--state", str(tmp_path))
    assert status == 1
    assert len(out.splitlines()) == 1 and "runs in" in out and "--state" in out


async def test_a_folder_without_a_model_is_one_clear_line(tmp_path):
    status, out = await start("--state", str(tmp_path), "--models", "/nowhere")
    assert (status, out) == (1, "prism: no model that can be served: /nowhere does not exist\n")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--catalogue", "/nowhere.toml"), "no catalogue at /nowhere.toml"),
        (("--device-mib", "0"), "--device-mib"),
        (("--cors-origin", "http://localhost:3000/"), 'write "http://localhost:3000"'),
        (("--cors-origin", "*", "--cors-origin", "http://localhost:3000"), "name no other beside it"),
        (("--state", "/tmp/" + "x" * 90), "too long a path"),
    ],
)
async def test_impossible_arguments_are_one_clear_line(arguments, words):
    status, out = await start(*arguments)
    assert status != 0
    assert words in out
