"""The requests that this engine has, by the two names they go by."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

from protos import common_pb2


@dataclass
class LiveRequest:
    """One request that has not ended."""

    request_id: str
    rid: str
    """SGLang's name of it. SGLang aborts by prefix, so no rid may be the beginning of another: a number and a
    colon come first."""
    prompt_tokens: int
    resumed_tokens: int = 0
    """The last ones of its prompt, which it said itself where it ran before."""
    told: bool = False
    """The first chunk was sent."""
    first_at: float | None = None
    """When its first token was seen here, by the time that all ranks agree on."""
    ending: common_pb2.Finish = common_pb2.FINISH_UNSPECIFIED
    """How it is to end once SGLang lets go of it, when it is we who end it."""
    error: str = ""
    withheld: bool = False
    """Its end is not told yet: its KV goes elsewhere first."""


class RequestTable:
    """All open requests."""

    def __init__(self) -> None:
        self._numbers = itertools.count(1)
        self._by_rid: dict[str, LiveRequest] = {}
        self._by_id: dict[str, LiveRequest] = {}

    def __len__(self) -> int:
        return len(self._by_rid)

    def __iter__(self) -> Iterator[LiveRequest]:
        return iter(list(self._by_rid.values()))

    def add(self, request_id: str, prompt_tokens: int, resumed_tokens: int = 0) -> LiveRequest:
        """Raises ValueError if the id is open already."""
        if request_id in self._by_id:
            raise ValueError(f"request {request_id} is here already")
        entry = LiveRequest(request_id, f"{next(self._numbers)}:{request_id}", prompt_tokens, resumed_tokens)
        self._by_rid[entry.rid] = self._by_id[request_id] = entry
        return entry

    def by_rid(self, rid: str) -> LiveRequest | None:
        return self._by_rid.get(rid)

    def by_id(self, request_id: str) -> LiveRequest | None:
        return self._by_id.get(request_id)

    def close(self, entry: LiveRequest) -> None:
        del self._by_rid[entry.rid]
        del self._by_id[entry.request_id]
