"""The process as it is started for real."""

from __future__ import annotations

import asyncio
import signal
import sys
from pathlib import Path

import httpx
import pytest

from gateway.config import GatewayConfig
from services.runtime.config import parse
from testing.patience import PATIENCE_S
from testing.ports import free_port
from tests.gateway import fakes
from tests.gateway.conftest import MODEL
from tests.gateway.fakes import FakeGroup, FakePlacement, Output
from tests.gateway.tokenizers import tiny

pytestmark = pytest.mark.usefixtures("executed")
ROOT = Path(__file__).resolve().parents[2]


def config(tmp_path: Path, **more: object) -> str:
    values = {
        "name": "gateway",
        "listen": f"unix:{tmp_path}/gateway.sock",
        "http": "127.0.0.1:0",
        "placement": f"unix:{tmp_path}/placement.sock",
        **more,
    }
    return "".join(f"{key} = {value!r}\n" for key, value in values.items())


async def start(tmp_path: Path, text: str) -> asyncio.subprocess.Process:
    path = tmp_path / "gateway.toml"
    path.write_text(text)
    return await asyncio.create_subprocess_exec(
        sys.executable, "-m", "gateway", "--config", str(path), cwd=ROOT, stderr=asyncio.subprocess.PIPE
    )


async def test_gateway_process_serves_until_sigterm(tmp_path: Path, folder: str) -> None:
    placement = FakePlacement(str(tmp_path / "placement.sock"))
    group = FakeGroup(
        str(tmp_path / "group.sock"), Output(list(tiny().encode("one two", add_special_tokens=False).ids))
    )
    await asyncio.gather(placement.start(), group.start())
    placement.routes.set([fakes.route(MODEL, folder, fakes.place(group))])
    port = free_port()
    process = await start(tmp_path, config(tmp_path, http=f"127.0.0.1:{port}"))
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=PATIENCE_S) as client:
        while True:
            try:
                if (await client.get("/health")).status_code == 200:
                    break
            except httpx.TransportError:
                assert process.returncode is None
            await asyncio.sleep(0.05)
        body = {"model": MODEL, "messages": [{"role": "user", "content": "hello"}]}
        answer = (await client.post("/v1/chat/completions", json=body)).json()
    assert answer["choices"][0]["message"]["content"] == "one two"
    process.send_signal(signal.SIGTERM)
    assert await asyncio.wait_for(process.wait(), PATIENCE_S) == 0
    await asyncio.gather(placement.die(), group.die())


async def test_gateway_with_an_unknown_setting_does_not_start_and_says_so_in_one_line(tmp_path: Path) -> None:
    process = await start(tmp_path, config(tmp_path, htpp="127.0.0.1:1"))
    _, errors = await process.communicate()
    assert process.returncode != 0
    said = f"{tmp_path}/gateway.toml: htpp: unknown key; the nearest one is http"
    assert errors.decode().strip().splitlines() == [said]


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"keys_file": "{}/none.toml"}, "{}/none.toml: No such file or directory"),
        ({"keys_file": "{}/gateway.toml"}, "{}/gateway.toml:1: name: unknown key"),
        ({"public_tls": {"certificate": "{}/c", "key": "{}/k"}}, "{}/c: No such file or directory"),
    ],
)
async def test_gateway_with_unusable_keys_or_certificates_does_not_start_and_says_so_in_one_line(
    tmp_path: Path, more: dict[str, object], said: str
) -> None:
    def here(value: object) -> object:
        return str(value).format(tmp_path) if isinstance(value, str) else value

    tables = {name: value for name, value in more.items() if isinstance(value, dict)}
    text = config(tmp_path, **{name: here(value) for name, value in more.items() if name not in tables})
    for name, table in tables.items():
        text += f"[{name}]\n" + "".join(f"{key} = {here(value)!r}\n" for key, value in table.items())
    process = await start(tmp_path, text)
    _, errors = await process.communicate()
    assert process.returncode == 1
    lines = [line for line in errors.decode().splitlines() if line.startswith("gateway: ")]
    assert lines == [f"gateway: {said.format(tmp_path)}"] and "Traceback" not in errors.decode()


@pytest.mark.parametrize(
    ("more", "key"),
    [
        ({"http": "8000"}, "http"),
        ({"http": "127.0.0.1:99999"}, "http"),
        ({"most_in_flight": 0}, "most_in_flight"),
        ({"park_time_out_s": 0}, "park_time_out_s"),
        ({"replay_limit": -1}, "replay_limit"),
    ],
)
def test_gateway_setting_with_an_impossible_value_is_named(tmp_path: Path, more: dict[str, object], key: str) -> None:
    with pytest.raises(ValueError, match=key):
        parse(GatewayConfig, config(tmp_path, **more), "gateway.toml")
