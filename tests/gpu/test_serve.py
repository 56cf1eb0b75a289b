"""What `make serve DEVICE=cuda MODELS=...` runs, from the first line until Ctrl-C.

Kernels are compiled when a machine first sees them: `PRISM_TEST_START_S=300` for that time.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp

from testing.ports import free_port
from testing.systems.local import FOLDER, MODELS, ROOT
from tests.gpu.conftest import DEVICE, free_bytes, until_free

START_S = float(os.environ.get("PRISM_TEST_START_S", "120"))
CHAT = {"messages": [{"role": "user", "content": "What is a list?"}], "temperature": 0, "max_tokens": 24}


def as_mistral(folder: Path) -> Path:
    """The Llama model by another name: Mistral without a sliding window is the same network."""
    copy = folder / "mistral"
    shutil.copytree(FOLDER / "llama-debian", copy)
    config = json.loads((copy / "config.json").read_text())
    config |= {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": None}
    (copy / "config.json").write_text(json.dumps(config))
    return copy


@asynccontextmanager
async def serving(*models: str) -> AsyncIterator[str]:
    """The address of its HTTP API. Ctrl-C at the end; raises AssertionError when that does not end everything."""
    address = f"127.0.0.1:{free_port()}"
    with tempfile.TemporaryDirectory(prefix="prism-") as state:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "deploy.local", "--device", DEVICE, "--http", address, "--state", state),
            *("--models", *models),
            cwd=ROOT,
            stdout=asyncio.subprocess.PIPE,
        )
        try:
            assert process.stdout is not None
            said = []
            async with asyncio.timeout(START_S):
                while not any("serving after" in line for line in said):
                    line = (await process.stdout.readline()).decode()
                    assert line, f"it ended: {said}"
                    said.append(line)
            yield f"http://{address}"
            process.send_signal(signal.SIGINT)
            async with asyncio.timeout(60):
                rest, _ = await process.communicate()
            assert process.returncode == 0 and b"everything has ended" in rest
        finally:
            if process.returncode is None:
                process.kill()


async def chat(http: aiohttp.ClientSession, base: str, model: str) -> str:
    """As a client that comes again when it is told to: a kernel may have to be compiled first."""
    async with asyncio.timeout(START_S):
        while True:
            async with http.post(f"{base}/v1/chat/completions", json={"model": model, **CHAT}) as answer:
                body = await answer.json()
                if answer.status != 503:
                    assert answer.status == 200, body
                    return str(body["choices"][0]["message"]["content"])
            await asyncio.sleep(float(answer.headers["Retry-After"]))


async def test_folders_of_all_supported_kinds_are_served_and_ctrl_c_gives_the_device_back(tmp_path):
    before = free_bytes()
    folders = [str(FOLDER / name) for name in MODELS]
    async with (
        serving(*folders, f"other={as_mistral(tmp_path)}") as base,
        aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(START_S)) as http,
    ):
        async with http.get(f"{base}/v1/models") as answer:
            assert {model["id"] for model in (await answer.json())["data"]} == {*MODELS, "other"}
        names = [*MODELS, "other"]
        said = dict(zip(names, await asyncio.gather(*(chat(http, base, name) for name in names)), strict=True))
        assert all(said.values())
        assert said["other"] == said["llama-debian"]
        again = dict(zip(names, await asyncio.gather(*(chat(http, base, name) for name in names)), strict=True))
        assert again == said
    await until_free(before)
