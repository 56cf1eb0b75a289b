"""Where what keys have used is counted: at this gateway, or in a Redis that several gateways share.

While the shared storage does not answer, each gateway goes by what it has counted itself, which it does all along: so a
limit holds at each gateway alone, and no request fails or waits for a storage that is away. It is tried again every
second. What was used meanwhile is not counted in it afterwards.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, NamedTuple, TypeVar
from urllib.parse import urlsplit

from limits.aio.storage import MemoryStorage, RedisClusterStorage, RedisSentinelStorage, RedisStorage
from limits.errors import ConfigurationError

from gateway import metrics
from services.runtime import tasks
from services.telemetry import log

_log = log.get(__name__)
T = TypeVar("T")
MINUTE_S = 60
_UNLIMITED = 1 << 62
ANSWER_S = 1.0
"""Seconds after which the shared storage counts as away: a healthy one answers in a millisecond."""
_AT_ONCE = 16
"""Number of calls at once, each of which takes a connection."""
_AGAIN_S = 1.0
_KINDS: dict[str, type[RedisStorage]] = {
    "redis": RedisStorage,
    "rediss": RedisStorage,
    "redis+unix": RedisStorage,
    "redis+sentinel": RedisSentinelStorage,
    "redis+cluster": RedisClusterStorage,
}
_FORMS = (
    "redis://HOST:PORT/DATABASE, rediss://HOST:PORT/DATABASE, redis+unix:///PATH, "
    "redis+sentinel://HOST:PORT,HOST:PORT/SERVICE or redis+cluster://HOST:PORT,HOST:PORT"
)


def check_uri(uri: str) -> str:
    """Returns the address of a shared storage, or "" for none. Raises ValueError, without the address: it may have a
    password."""
    if not uri or "${" in uri:  # the environment's variables are not filled in yet (services/runtime/config.py)
        return uri
    try:
        _open(uri)
    except (ConfigurationError, ValueError, KeyError, TypeError):
        raise ValueError(f"not the address of a Redis: {_FORMS}") from None
    return uri


def shown(uri: str) -> str:
    """The address without user, password and options, for logs."""
    split = urlsplit(uri)
    return f"{split.scheme}://{split.netloc.rpartition('@')[2]}{split.path}"


def _open(uri: str) -> RedisStorage:
    """The storage at an address; connects to nothing yet. Raises ConfigurationError, ValueError, KeyError, TypeError
    for what is no address."""
    # Imported here: it takes a tenth of a second, and few gateways share their quotas.
    from redis.asyncio.retry import Retry
    from redis.backoff import NoBackoff

    split = urlsplit(uri)
    if not (split.path if split.scheme == "redis+unix" else split.hostname):
        raise ValueError
    # A call is not repeated: whether it was counted is not known, and a request would wait.
    return _KINDS[split.scheme](
        f"async+{uri}",
        implementation="redispy",
        key_prefix="prism",
        retry=Retry(NoBackoff(), 0),  # type: ignore[arg-type]
    )


class Window(NamedTuple):
    """What was used, in the fields of `limits`: amounts of the previous and the current minute of the storage's
    clock."""

    previous: int
    previous_left_s: float
    """Seconds for which the previous minute still reaches into the last 60 s; 0 if nothing was used in it."""
    current: int
    current_left_s: float
    """Seconds until nothing of the current minute counts any more."""

    @property
    def used(self) -> float:
        return self.previous * self.previous_left_s / MINUTE_S + self.current

    @property
    def reset_s(self) -> float:
        """Seconds until nothing that was used counts any more, if nothing is added."""
        return self.current_left_s if self.current else self.previous_left_s

    def wait_s(self, amount: int, limit: int) -> float:
        """Seconds until `amount`, which is at most `limit`, fits under `limit`, if nothing is added."""
        room = limit - amount
        if self.used <= room:
            return 0.0
        if self.current <= room:  # it fits once the previous minute has faded enough
            return self.previous_left_s - (room - self.current) * MINUTE_S / self.previous
        return self.current_left_s - room * MINUTE_S / self.current


class QuotaStorage:
    """Counters of the last minute, by key."""

    def __init__(self, uri: str = "", *, answer_s: float = ANSWER_S, again_s: float = _AGAIN_S) -> None:
        """`uri`: address of the shared storage, checked by `check_uri`; empty: this gateway counts for itself.
        `again_s`: seconds between looks at one that is away."""
        self._own = MemoryStorage()
        self._shared = _open(uri) if uri else None
        self._shown = shown(uri)
        self._answer_s = answer_s
        self._again_s = again_s
        self._calls = asyncio.Semaphore(_AT_ONCE)
        self._back: asyncio.Task[None] | None = None
        """Looks for the shared storage while it is away."""

    async def window(self, key: str) -> Window:
        shared = None if self._shared is None else await self._ask(self._shared.get_sliding_window(key, MINUTE_S))
        return Window(*(shared or await self._own.get_sliding_window(key, MINUTE_S)))

    async def take(self, key: str, amount: int, limit: int) -> bool:
        """Counts `amount` if it fits under `limit`, and says whether it does."""
        if self._shared is not None:
            taken = await self._ask(self._shared.acquire_sliding_window_entry(key, limit, MINUTE_S, amount))
            if taken is not None:
                return taken and await self._own.acquire_sliding_window_entry(key, _UNLIMITED, MINUTE_S, amount)
        return await self._own.acquire_sliding_window_entry(key, limit, MINUTE_S, amount)

    async def use(self, key: str, amount: int) -> None:
        """Counts what was used, also above a limit: it has happened."""
        await self.take(key, amount, _UNLIMITED)

    async def _ask(self, call: Coroutine[Any, Any, T]) -> T | None:
        """What the shared storage answers; None if it is away."""
        if self._back is not None:
            call.close()
            return None
        try:
            async with asyncio.timeout(self._answer_s), self._calls:
                return await call
        except Exception as error:  # whatever a client of Redis raises: quotas must not make requests fail
            if self._back is None:
                why = f"no answer within {self._answer_s:g} s" if isinstance(error, TimeoutError) else str(error)
                _log.warning("quota_storage is away: this gateway counts for itself", storage=self._shown, why=why)
                metrics.QUOTA_STORAGE_AWAY.set(1)
                self._back = tasks.spawn(self._until_back(), "look for quota_storage")
            return None
        finally:
            call.close()  # one that has not begun would be warned of

    async def _until_back(self) -> None:
        assert self._shared is not None
        while True:
            await asyncio.sleep(self._again_s)
            try:
                async with asyncio.timeout(self._answer_s):
                    # As requests do: what reads its file still, or may not be written to, answers a PING.
                    await self._shared.acquire_sliding_window_entry("back", _UNLIMITED, MINUTE_S, 0)
            except Exception:  # it is away still, which the log says already
                continue
            break
        self._back = None
        metrics.QUOTA_STORAGE_AWAY.set(0)
        _log.info("quota_storage is back", storage=self._shown)

    async def close(self) -> None:
        if self._back is not None:
            await tasks.cancel(self._back)
        if self._shared is not None:
            await self._shared.bridge.storage.aclose()  # type: ignore[attr-defined]  # each bridge has one
