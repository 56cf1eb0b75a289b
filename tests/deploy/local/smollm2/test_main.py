"""`python -m deploy.local.smollm2`."""

import asyncio
import sys

from deploy.local.smollm2 import folder
from tests.deploy.local.test_main import ROOT


async def start(*arguments):
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "deploy.local.smollm2", *arguments, cwd=ROOT,
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    out, err = await process.communicate()
    return process.returncode, out.decode(), err.decode()


async def test_smollm2_command_with_an_existing_folder_prints_only_its_path(smollm2):
    assert await start() == (0, f"{folder.FOLDER}\n", "")


async def test_smollm2_command_with_an_impossible_folder_fails_in_one_line():
    status, out, err = await start("/proc/nowhere/smollm2")
    assert (status, out) == (1, "") and err.startswith("prism: smollm2: ") and len(err.splitlines()) == 1
