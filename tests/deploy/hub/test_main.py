"""`python -m deploy.hub`, which is `prism fetch`."""

import asyncio
import os
import signal
import sys
from pathlib import Path

import pytest

from deploy.local.hub_models import fetched
from services.errors import Unmet
from testing.hub import hub
from testing.patience import PATIENCE_S
from tests.loader import checkpoint_files

ROOT = Path(__file__).resolve().parents[3]
WEIGHTS = "model.safetensors"
SMALL_DISK = (
    *("unshare", "--mount", "--map-root-user", "sh", "-c"),
    'mount -t tmpfs -o size=1m disk "$HF_HOME" && "$0" "$@"; s=$?; find "$HF_HOME" -name "*.incomplete"; exit $s',
)
"""Runs a command with a disk of 1 MiB at HF_HOME, and prints the files there that are not whole."""


@pytest.fixture
def remote(tmp_path):
    with hub() as remote:
        remote.publish("org/model", checkpoint_files.write(tmp_path / "checkpoint"))
        yield remote


async def start(remote, home, *arguments, under=()):
    home.mkdir(exist_ok=True)
    return await asyncio.create_subprocess_exec(
        *under, sys.executable, "-m", "deploy.hub", *arguments, cwd=ROOT,
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
        env={**os.environ, "HF_ENDPOINT": remote.address, "HF_HOME": str(home)},
    )  # fmt: skip


async def test_fetched_models_are_told_by_their_folders_once_all_of_them_are_known(remote, tmp_path):
    process = await start(remote, tmp_path / "home", "org/model", "org/other")
    out, err = await process.communicate()
    assert (process.returncode, out) == (1, b"") and err.decode().startswith("prism: the hub at ")
    process = await start(remote, tmp_path / "home", "org/model", "--device", "cpu")
    out, _ = await process.communicate()
    (folder,) = out.decode().splitlines()
    assert process.returncode == 0 and (Path(folder) / WEIGHTS).is_file()


@pytest.mark.parametrize("argument", ["smollm2", "s3://bucket/model"])
async def test_what_is_no_name_of_a_model_is_a_fault_of_usage(remote, tmp_path, argument):
    process = await start(remote, tmp_path / "home", argument)
    _, err = await process.communicate()
    assert process.returncode == 2 and argument in err.decode()


async def test_ctrl_c_in_mid_download_ends_at_once_and_leaves_nothing_half_made(remote, tmp_path):
    remote.stall_after[WEIGHTS] = 1000
    home = tmp_path / "home"
    process = await start(remote, home, "org/model")
    assert await asyncio.to_thread(remote.stalled.wait, PATIENCE_S)
    begun = list(home.rglob("*.incomplete"))
    process.send_signal(signal.SIGINT)
    _, err = await asyncio.wait_for(process.communicate(), PATIENCE_S)
    assert process.returncode == 130 and err.decode().endswith("stay for the next time\n")
    assert begun and not list(home.rglob("*.incomplete")) and not list(home.rglob(WEIGHTS))


async def test_disk_that_fills_in_mid_download_is_named_and_nothing_half_made_stays(remote, tmp_path):
    there = {path.name: path.read_bytes() for path in (tmp_path / "checkpoint").iterdir()}
    remote.publish("org/large", there | {WEIGHTS: bytes(2 << 20)})
    remote.repositories["org/large"].sizes[WEIGHTS] = 1
    process = await start(remote, tmp_path / "home", "org/large", under=SMALL_DISK)
    out, err = await process.communicate()
    if b"unshare" in err or b"mount:" in err:
        pytest.skip("no file systems of its own for this user")
    assert process.returncode == 1 and out == b""
    assert (
        err.decode().splitlines()[-1].startswith(f"prism: org/large: the disk of {tmp_path / 'home' / 'hub'} is full")
    )


async def test_model_of_a_class_that_is_not_in_the_table_is_fetched_for_an_entry_that_says_unverified(
    remote, tmp_path, monkeypatch
):
    remote.publish("org/new", checkpoint_files.write(tmp_path / "new", architectures=["OlmoForCausalLM"]))
    monkeypatch.setenv("HF_ENDPOINT", remote.address)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
    stopping = asyncio.get_running_loop().create_future()
    with pytest.raises(
        Unmet, match="nothing was started: org/new, org/model are no folders here and were taken for mod"
    ):
        await fetched(["a=org/new", "org/model"], "cpu", stopping, ["org/model"])
    new, model = await fetched(["a=org/new", "org/model"], "cpu", stopping, ["a"])
    assert new.startswith("a=/") and model.startswith("org/model=/")
