"""The kinds of KV that a model keeps, and how many bytes of a device a request needs of them."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field, replace
from math import inf

ATTENTION = "attention"
"""Keys and values of every token; their heads are divided among the devices."""
WINDOW = "window"
"""Keys and values of the latest tokens of a request, in a pool of their own."""
STATE = "state"
"""Summary that layers of linear attention or a state space keep of all tokens so far, of a size that does not depend on
their number."""
LATENT = "latent"
"""Compressed keys and values of every token (MLA), which are the same on each device."""
PADDING_STATES = 1
"""Number of states of a pool that no request can have: the empty places of a batch use the first one."""
BESIDE_TOKENS = 192
"""Tokens of a floor beyond those of the longest request, in each kind that has bytes for tokens: three pages of at most
64. SGLang begins a request only where these fit beside its prompt and its answer: one page stays empty, one is the
request's last, which it fills partly, and one is for what SGLang rounds up. Without them a request as long as the
context would wait for ever, and all requests behind it."""
BEYOND_WINDOW_TOKENS = 2048 + 64
"""Tokens that a request is taken to hold beyond its window before an engine has reported the number: a chunk of its
prompt, of the default length on GPUs, and a page of the greatest length."""
_USUAL_TOKENS = 1024
"""Tokens of a usual request. The mean bytes a token of such a request are the demand of a model in which every kind
stops growing."""


@dataclass(frozen=True, slots=True)
class KvKind:
    """One kind of KV, with bytes for each token or bytes for each state, not both. Bytes are those of one device,
    except in what `times` returns. Raises ValueError for values that no kind has."""

    name: str
    """ATTENTION, WINDOW, STATE or LATENT, or a name of a later version. The name is for people: bytes are counted by
    the numbers alone."""
    bytes_per_token: int = 0
    window_tokens: int = 0
    """Number of latest tokens of a request that layers of this kind read; 0: they read all of them."""
    beyond_window_tokens: int = 0
    """Tokens that a request holds beyond its window: a chunk of its prompt and a page. 0 without a window."""
    bytes_per_state: int = 0
    states: int = 0
    """Number of states that a request holds: 1, or more where others are kept to continue a prompt from."""
    divided: bool = True
    """Whether each device of a model on several has a part of the kind. False: each device has the whole."""

    def __post_init__(self) -> None:
        sizes = (self.bytes_per_token, self.window_tokens, self.beyond_window_tokens, self.bytes_per_state, self.states)
        if min(sizes) < 0:
            raise ValueError(f"KV of the kind {self.name!r} has a size below zero")
        if bool(self.bytes_per_state) != bool(self.states):
            raise ValueError(f"KV of the kind {self.name!r} has {self.states} states of {self.bytes_per_state} bytes")
        if bool(self.bytes_per_state) == bool(self.bytes_per_token):
            raise ValueError(f"KV of the kind {self.name!r} has bytes for each token or for each state, not both")
        if self.window_tokens and self.states or self.beyond_window_tokens and not self.window_tokens:
            raise ValueError(f"KV of the kind {self.name!r} has tokens of a window, and is none")

    @property
    def most_in_window(self) -> int:
        """Most tokens that a request holds of this kind if it is a window; 0 if it is none."""
        return self.window_tokens + self.beyond_window_tokens

    def tokens_of(self, tokens: int) -> int:
        """Number of tokens of this kind that a request with `tokens` in all holds."""
        return min(tokens, self.most_in_window) if self.window_tokens else tokens

    def bytes_of(self, tokens: int) -> int:
        """Bytes of this kind that one request with `tokens` in all needs; 0 for a request without tokens."""
        if tokens <= 0:
            return 0
        return self.states * self.bytes_per_state + self.tokens_of(tokens) * self.bytes_per_token

    def in_extents(self, extent_bytes: int) -> KvKind:
        """The kind where memory comes in extents: each state has whole extents to itself."""
        return replace(self, bytes_per_state=_up(self.bytes_per_state, extent_bytes))

    def times(self, devices: int) -> KvKind:
        """The kind with the bytes of all `devices` together."""
        return replace(
            self, bytes_per_token=devices * self.bytes_per_token, bytes_per_state=devices * self.bytes_per_state
        )

    def share(self, devices: int) -> KvKind:
        """The kind with the bytes of one of `devices`. This one has to have those of all of them together."""
        return replace(
            self,
            bytes_per_token=-(-self.bytes_per_token // devices),
            bytes_per_state=-(-self.bytes_per_state // devices),
        )


def attention(bytes_per_token: int) -> KvKind:
    """Keys and values of every token."""
    return KvKind(ATTENTION, bytes_per_token)


def window(bytes_per_token: int, window_tokens: int, beyond_window_tokens: int) -> KvKind:
    """Keys and values of the latest tokens."""
    return KvKind(WINDOW, bytes_per_token, window_tokens, beyond_window_tokens)


def state(bytes_per_state: int, states: int = 1) -> KvKind:
    """`states` states for each request."""
    return KvKind(STATE, bytes_per_state=bytes_per_state, states=states)


def latent(bytes_per_token: int) -> KvKind:
    """Compressed keys and values of every token, on each device."""
    return KvKind(LATENT, bytes_per_token, divided=False)


@dataclass(frozen=True, slots=True)
class KvLayout:
    """All kinds of one model, with the bytes of one device. A layout without kinds takes nothing."""

    kinds: tuple[KvKind, ...] = ()
    _growing: int = field(init=False, repr=False, compare=False)
    """Bytes a token of the kinds without a window."""
    _states: int = field(init=False, repr=False, compare=False)
    """Bytes of a request's states."""
    _windows: tuple[KvKind, ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        # The sums are kept, because a plan asks for the need of every request that may start.
        windows = tuple(kind for kind in self.kinds if kind.window_tokens)
        growing = sum(kind.bytes_per_token for kind in self.kinds if not kind.window_tokens)
        object.__setattr__(self, "_windows", windows)
        object.__setattr__(self, "_growing", growing)
        object.__setattr__(self, "_states", sum(kind.states * kind.bytes_per_state for kind in self.kinds))

    def __bool__(self) -> bool:
        return bool(self.kinds)

    def bytes_of(self, tokens: int, requests: int = 1) -> int:
        """Most bytes that `requests` requests with `tokens` tokens in all need. The number is exact for one request,
        and where all requests are shorter, or all are longer, than every window."""
        if tokens <= 0 or requests <= 0:
            return 0
        need = tokens * self._growing + requests * self._states
        for kind in self._windows:
            need += min(tokens, requests * kind.most_in_window) * kind.bytes_per_token
        return need

    def most_tokens(self, nbytes: int, requests: int = 1) -> int:
        """Most tokens in all of `requests` requests for which `bytes_of` is not above `nbytes`; sys.maxsize: any
        number."""
        # The need grows by `slope` bytes a token, which falls wherever a window is full: the smallest is full first.
        left, tokens = nbytes - requests * self._states, 0
        slope = self.marginal(0)
        if left < 0 or requests <= 0:
            return 0
        for kind in sorted(self._windows, key=lambda kind: kind.most_in_window):
            more = requests * kind.most_in_window - tokens
            if left < more * slope:
                return tokens + left // slope
            left, tokens = left - more * slope, tokens + more
            slope -= kind.bytes_per_token
        return tokens + left // slope if slope else sys.maxsize

    def marginal(self, tokens: float) -> int:
        """Bytes that one more token adds to a request of `tokens` tokens, its states left out. With +inf the request is
        longer than every window."""
        grows = sum(kind.bytes_per_token for kind in self._windows if tokens < kind.most_in_window)
        return self._growing + grows

    @property
    def demand_bytes(self) -> int:
        """Bytes a token by which a model's demand for KV is counted: those that one more token adds to a long request,
        or, if it adds none because every kind stops growing, the mean of a usual request."""
        return self.marginal(inf) or -(-self.bytes_of(_USUAL_TOKENS) // _USUAL_TOKENS)

    def in_extents(self, extent_bytes: int) -> KvLayout:
        """The layout where memory comes in extents: each state has whole extents to itself."""
        return KvLayout(tuple(kind.in_extents(extent_bytes) for kind in self.kinds))

    def times(self, devices: int) -> KvLayout:
        """The layout with the bytes of all `devices` together."""
        return self if devices == 1 else KvLayout(tuple(kind.times(devices) for kind in self.kinds))

    def share(self, devices: int) -> KvLayout:
        """The layout of one of `devices`. This one has to have the bytes of all of them together."""
        return self if devices == 1 else KvLayout(tuple(kind.share(devices) for kind in self.kinds))


def of_tokens(bytes_per_token: int) -> KvLayout:
    """The layout of a model with attention alone, which has no kinds if a token takes no bytes."""
    return KvLayout((attention(bytes_per_token),) if bytes_per_token else ())


def _up(nbytes: int, unit: int) -> int:
    return -(-nbytes // unit) * unit
