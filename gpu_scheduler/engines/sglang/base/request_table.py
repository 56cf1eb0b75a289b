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
    """The gpu_scheduler's name of the request."""
    rid: str
    """SGLang's name of the request. SGLang aborts by prefix, so no rid may be the beginning of another: a number and a
    colon come first."""
    prompt_tokens: int
    """Tokens of the prompt, resumed ones included."""
    resumed_tokens: int = 0
    """Last tokens of the prompt that are the request's own output from where it ran before."""
    adapter: str = ""
    """Key of its adapter (`policy/adapter_room.py`); empty: none."""
    told: bool = False
    """True once its first chunk was sent."""
    first_at: float | None = None
    """Monotonic seconds at which its first token was seen here, by the clock that all ranks agree on; None: not yet."""
    ending: common_pb2.Finish = common_pb2.FINISH_UNSPECIFIED
    """Finish reason to report once SGLang lets go of the request, when the engine ends it; unspecified: SGLang ends
    it."""
    error: str = ""
    withheld: bool = False
    """True while its end is not reported yet, because its KV is transferred to another engine first."""


class RequestTable:
    """All requests that have not ended."""

    def __init__(self) -> None:
        self._numbers = itertools.count(1)
        self._by_rid: dict[str, LiveRequest] = {}
        self._by_id: dict[str, LiveRequest] = {}

    def __len__(self) -> int:
        return len(self._by_rid)

    def __iter__(self) -> Iterator[LiveRequest]:
        return iter(list(self._by_rid.values()))

    def add(self, request_id: str, prompt_tokens: int, resumed_tokens: int = 0, adapter: str = "") -> LiveRequest:
        """Adds a request and gives it a rid. Raises ValueError if `request_id` is in the table already."""
        if request_id in self._by_id:
            raise ValueError(f"request {request_id} is here already")
        entry = LiveRequest(request_id, f"{next(self._numbers)}:{request_id}", prompt_tokens, resumed_tokens, adapter)
        self._by_rid[entry.rid] = self._by_id[request_id] = entry
        return entry

    @property
    def adapters(self) -> set[str]:
        """Keys of the adapters that requests have."""
        return {entry.adapter for entry in self._by_rid.values()} - {""}

    def by_rid(self, rid: str) -> LiveRequest | None:
        """The request with SGLang's name `rid`; None: not in the table."""
        return self._by_rid.get(rid)

    def by_id(self, request_id: str) -> LiveRequest | None:
        """The request named `request_id`; None: not in the table."""
        return self._by_id.get(request_id)

    def close(self, entry: LiveRequest) -> None:
        """Removes a request that has ended. Raises KeyError if it is not in the table."""
        del self._by_rid[entry.rid]
        del self._by_id[entry.request_id]
