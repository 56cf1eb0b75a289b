"""The tokens and requests that a key may use in a minute, and the answers that it may have in progress at once.

They are counted with `limits`' sliding window counter: what was used in this minute of the clock, and of the minute
before as much as still reaches into the last 60 s. That takes two numbers a key, however many tokens; it is exact as
far as usage within the minute before was even. Each gateway counts for itself, and from nothing when it starts, unless
several share a storage (`gateway/access/quota_storage.py`). What runs counts at its own gateway alone until it has
ended, so that a gateway that dies leaves nothing behind that somebody would have to take back.

Tokens are those of prompt and answer. While an answer is made, the most that the request allows it counts against the
limit; once it has ended, what it had. So many requests at once cannot pass a limit, and a client that names a high
`max_tokens` as most do pays for what it got. (OpenAI charges the estimate. A window that is only ever charged
afterwards lets through, at once, whatever the requests of a minute may ask for.)
"""

from __future__ import annotations

import math

from gateway.access.keys import Key
from gateway.access.quota_storage import QuotaStorage, Window
from gateway.errors import Headers, OverLimit, TooMany
from services.runtime import tasks
from services.wording.plurals import agreeing, counted

UNSAID_TOKENS = 512
"""Tokens that an answer counts while it is made if its client set no limit: with the context as the limit one request
would take a key's whole minute."""


class Meter:
    """What one key has used of one kind: requests or tokens."""

    def __init__(self, storage: QuotaStorage, kind: str, name: str) -> None:
        self._storage = storage
        self._kind = kind
        self._key = f"{kind}/{name}"
        self.held = 0
        """The most that running requests may still use."""

    async def use(self, amount: int) -> None:
        """Counts what was used, also above a limit: it has happened."""
        if amount:
            await self._storage.use(self._key, amount)

    async def take(self, amount: int, limit: int) -> None:
        """Counts `amount` if it fits, also where several gateways ask at once. Raises OverLimit."""
        if not await self._storage.take(self._key, amount, limit):
            raise self._over(amount, limit, await self._storage.window(self._key))

    async def check(self, amount: int, limit: int) -> None:
        """Raises OverLimit unless `amount` more fits, beside what is held."""
        window = await self._storage.window(self._key)
        if window.used + self.held + amount > limit:
            raise self._over(amount, limit, window)

    def _over(self, amount: int, limit: int, window: Window) -> OverLimit:
        said = f"{self._kind} per min: Limit {limit}, "
        headers = self._headers(limit, window)
        if amount > limit:
            return OverLimit(f"Request too large on {said}Requested {amount}.", self._kind, headers, None)
        # When requests in progress will end is not known, so held amounts are left out of this time.
        again_s = max(1, math.ceil(window.wait_s(amount, limit)))
        used = math.ceil(window.used) + self.held
        return OverLimit(
            f"Rate limit reached on {said}Used {used}, Requested {amount}. Please try again in {again_s}s.",
            self._kind,
            headers,
            again_s,
        )

    async def headers(self, limit: int) -> Headers:
        return self._headers(limit, await self._storage.window(self._key))

    def _headers(self, limit: int, window: Window) -> Headers:
        left = max(0, limit - math.ceil(window.used) - self.held)
        values = {"limit": str(limit), "remaining": str(left), "reset": f"{window.reset_s:.3f}s"}
        return [(f"x-ratelimit-{name}-{self._kind}".encode(), value.encode()) for name, value in values.items()]


class Charge:
    """The tokens that one request holds, from its start to its end."""

    def __init__(self, meter: Meter | None = None, held: int = 0) -> None:
        self._meter = meter
        self._held = held

    def settle(self, tokens: int) -> None:
        """Ends the hold, and counts the tokens that were used."""
        if self._meter is not None:
            tasks.spawn(self._settle(self._meter, tokens), "count tokens")

    async def _settle(self, meter: Meter, tokens: int) -> None:
        await meter.use(tokens)
        meter.held -= self._held


class Quota:
    """Usage and limits of one key. What it has used stays when its limits change."""

    def __init__(self, storage: QuotaStorage, name: str) -> None:
        self._requests = Meter(storage, "requests", name)
        self._tokens = Meter(storage, "tokens", name)
        self.in_flight = 0
        """Number of answers that are being made or waited for."""

    def take_in_flight(self, key: Key, count: int) -> None:
        """Counts `count` answers that begin. Raises TooMany."""
        if key.in_flight is not None and self.in_flight + count > key.in_flight:
            raise TooMany(
                f"{counted(self.in_flight, 'answer')} of the key '{key.name}' {agreeing(self.in_flight, 'is', 'are')} "
                f"in flight and {count} more {agreeing(count, 'was', 'were')} asked for; at most {key.in_flight} "
                f"{agreeing(key.in_flight, 'is', 'are')} taken"
            )
        self.in_flight += count

    async def take_request(self, key: Key) -> None:
        """Counts a request. Raises OverLimit; a refused request does not count."""
        if key.requests_per_minute is not None:
            await self._requests.take(1, key.requests_per_minute)

    async def hold(self, key: Key, prompt: int, answers: int, answers_said: bool) -> Charge:
        """Holds the tokens of a prompt, and the most that its answers may have if the client set that (`answers_said`).
        Raises OverLimit."""
        if key.tokens_per_minute is None:
            return Charge()
        if not answers_said:
            answers = min(answers, max(0, key.tokens_per_minute - prompt))
        await self._tokens.check(prompt + answers, key.tokens_per_minute)
        self._tokens.held += prompt + answers
        return Charge(self._tokens, prompt + answers)

    async def headers(self, key: Key) -> Headers:
        """Rate-limit headers with OpenAI's names."""
        headers: Headers = []
        if key.requests_per_minute is not None:
            headers += await self._requests.headers(key.requests_per_minute)
        if key.tokens_per_minute is not None:
            headers += await self._tokens.headers(key.tokens_per_minute)
        return headers


class Quotas:
    """Quotas of all keys, by name."""

    def __init__(self, storage: QuotaStorage | None = None) -> None:
        self._storage = storage or QuotaStorage()
        self._quotas: dict[str, Quota] = {}

    def of(self, key: Key) -> Quota:
        if key.name not in self._quotas:
            self._quotas[key.name] = Quota(self._storage, key.name)
        return self._quotas[key.name]
