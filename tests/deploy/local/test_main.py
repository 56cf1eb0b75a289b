import asyncio
import fcntl
import subprocess
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


async def test_folders_without_a_model_are_named_one_a_line(tmp_path):
    models = ("m=/nowhere/v=3", str(tmp_path))
    status, out = await start("--state", str(tmp_path / "state"), "--models", *models)
    assert (status, out) == (
        1,
        "prism: no model can be served:\n"
        "  m: /nowhere/v=3 does not exist\n"
        f"  {tmp_path.name}: {tmp_path} has no config.json\n",
    )


async def test_a_catalogue_that_cannot_be_used_is_one_line_before_anything_starts(tmp_path):
    (tmp_path / "c.toml").write_text("[[model]\n")
    status, out = await start("--state", str(tmp_path), "--catalogue", str(tmp_path / "c.toml"))
    assert status == 1 and out.startswith("prism: no catalogue that can be used: ") and out.count("\n") == 1


def test_make_gives_every_folder_on_as_it_is():
    models = "/models/a b=/v=3/c org/d=/models/d"
    said = subprocess.run(
        ["make", "-n", "serve", f"MODELS={models}", f"PYTHON={sys.executable}"],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert f" --models {models} " in said.stdout.splitlines()[-1] + " "


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--catalogue", "/nowhere.toml"), "no catalogue at /nowhere.toml"),
        (("--device-mib", "0"), "--device-mib"),
        (("--state", "/tmp/" + "x" * 90), "too long a path"),
    ],
)
async def test_impossible_arguments_are_one_clear_line(arguments, words):
    status, out = await start(*arguments)
    assert status != 0
    assert words in out
