"""OpenAI's and Anthropic's clients for JavaScript: `js/client.mjs` has the calls, node runs them."""

from __future__ import annotations

import asyncio
import hashlib
import os
import shutil
import subprocess
from pathlib import Path

import pytest

from testing.patience import PATIENCE_S
from tests.clients.conftest import EMBEDDER, KEY, SLEEPER
from tests.gateway.conftest import MODEL, World

HERE = Path(__file__).parent / "js"
NODE, NPM = shutil.which("node"), shutil.which("npm")
pytestmark = pytest.mark.skipif(not (NODE and NPM), reason="no node here")


@pytest.fixture(scope="module")
def installed() -> Path:
    """A folder with the script and what it needs, kept for the next time."""
    files = sorted(HERE.iterdir())
    version = hashlib.sha256(b"".join(file.read_bytes() for file in files if file.suffix == ".json")).hexdigest()[:16]
    cache = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "prism-tests"
    folder = cache / f"clients-{version}"
    if not folder.exists():
        cache.mkdir(parents=True, exist_ok=True)
        making = cache / f"making-{os.getpid()}"
        making.mkdir()
        for file in files:
            if file.suffix == ".json":
                shutil.copy(file, making)
        assert NPM is not None
        made = subprocess.run(
            [NPM, "ci", "--ignore-scripts", "--no-audit", "--no-fund"], cwd=making, capture_output=True, text=True
        )
        if made.returncode:
            shutil.rmtree(making)
            pytest.skip(f"npm ci: {made.stderr.strip().splitlines()[-1] if made.stderr.strip() else made.returncode}")
        try:
            making.rename(folder)
        except OSError:  # another run was first
            shutil.rmtree(making)
    mine = shutil.copy(HERE / "client.mjs", folder / f"{os.getpid()}.mjs")
    os.replace(mine, folder / "client.mjs")  # another run may be reading the one that is there
    return folder


async def test_javascript_client_gets_the_answers_it_expects(installed: Path, parrot: World) -> None:
    assert NODE is not None
    node = await asyncio.create_subprocess_exec(
        NODE,
        "client.mjs",
        cwd=installed,
        env={
            **os.environ,
            "PRISM_URL": parrot.url,
            "PRISM_KEY": KEY,
            "PRISM_MODEL": MODEL,
            "PRISM_EMBEDDER": EMBEDDER,
            "PRISM_SLEEPER": SLEEPER,
        },
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    async with asyncio.timeout(PATIENCE_S):
        out, _ = await node.communicate()
        assert node.returncode == 0, out.decode()
        # Those it gave up, by time-out and in mid-stream, do not run on. The first may never have come.
        requests = [request for group in parrot.groups for request in group.requests]
        for request in requests:
            if request.submit.token_ids == requests[-1].submit.token_ids:
                await request.cancelled.wait()
