"""The ranks of one engine: processes that compute one model together, one on each of its devices.

SGLang's scheduler runs in each of them and decides for itself. So before every step all ranks tell rank 0 what is new
with them, and rank 0 tells all what holds for the step: the gpu_scheduler's messages, the time, whether and at what
throttle the engine may prefill, whether decode steps wait for a neighbour engine's step, and the memory that every rank
has. In between, what may fail on one rank (mapping, checksums) is done by all and then agreed on.

They speak over socket pairs that the gpu_scheduler made, not over SGLang's process groups: these can be waited for
together with other descriptors, for ever, without a timeout and without a thread that wakes up.
"""

from __future__ import annotations

import pickle
import random
import secrets
import select
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from typing import Any, Protocol, TypeVar

from gpu_scheduler.engines.sglang.base.errors import CommandError
from gpu_scheduler.engines.sglang.policy.agreement import RankFacts, RanksDisagree, StepAgreement, agree
from gpu_scheduler.engines.shared_board import SharedBoard, wanted
from gpu_scheduler.engines.sharing import decode_arbitration
from gpu_scheduler.engines.sharing.prefill_priority import PrefillPriority, worth
from gpu_scheduler.engines.sharing.solo_step_time import DecodeStep
from gpu_scheduler.engines.sharing.throttle import FREE, PrefillThrottle

T = TypeVar("T")


class Ranks(Protocol):
    """One rank's view of all ranks of its engine. `rank` counts from 0, `size` is their number."""

    rank: int
    size: int

    @property
    def agreed(self) -> StepAgreement:
        """Facts that hold for all ranks in this step."""
        ...

    def listen(self, facts: Callable[[], RankFacts], wake_fd: int = -1) -> None:
        """Registers `facts`, which is called once before every step for this rank's own facts. `wake_fd` is readable
        when there are new ones."""
        ...

    def now(self) -> float:
        """Monotonic seconds; the same in all ranks during a step."""
        ...

    def pace(self) -> PrefillThrottle | None:
        """The throttle for this engine's next prefill step; None: another engine has the prefill turn."""
        ...

    def pace_now(self) -> PrefillThrottle | None:
        """The throttle as it is now rather than at the start of the step, for the rank that waits for it to change."""
        ...

    def gives_way(self) -> bool:
        """Whether the next decode step waits for a step of a neighbour engine."""
        ...

    def gives_way_now(self) -> bool:
        """Whether the next decode step waits as things are now rather than at the start of the step, for the rank that
        waits for that to change."""
        ...

    def stepped(self) -> None:
        """Notes that a step goes to the device: the next one may wait as long again."""
        ...

    def decodes(self, requests: int, need: float | None, wanting: bool) -> None:
        """Publishes the engine's bid for decode steps to its neighbours: it decodes `requests` and needs the share
        `need` of the devices to meet their targets; `wanting`: it wants more than it has had. `need` is None if nothing
        decodes, or without a target."""
        ...

    def alone(self) -> bool:
        """Whether the last decode step that `gives_way` allowed has the device to itself."""
        ...

    def claim(self, prompts: int) -> None:
        """Claims the device for a prefill step that `prompts` prompts wait for: decode steps of neighbour engines may
        have to wait for it."""
        ...

    def release(self) -> None:
        """Ends the claim: the prefill step is over."""
        ...

    def decode_step(self, own: DecodeStep) -> DecodeStep:
        """Duration of a decode step that has the device to itself: `own`, or with several ranks the one that rank 0
        sent before this step."""
        ...

    def seed(self) -> int:
        """63 random bits, the same in all ranks."""
        ...

    def begin(self) -> None:
        """Waits until all ranks have started."""
        ...

    def gather(self, own: T) -> list[T]:
        """Collects `own` of every rank, in the order of ranks. All ranks must call it. Raises the CommandError of a
        rank that settles a failure meanwhile, as that rank will not come here."""
        ...

    def settle(self, failure: CommandError | None, timeout_s: float | None = None) -> None:
        """Waits until all ranks have called it without a failure. Where one failed all raise CommandError: that rank
        its own, the others that rank's. A failure that all ranks have raised already is raised at once. Raises
        SystemExit if another rank says nothing for `timeout_s` seconds (None: no bound) or is gone."""
        ...


class _Turn:
    """Arbitration with neighbour engines over the board that they share; without a board nothing ever waits."""

    def __init__(self, turn: SharedBoard | None, index: int) -> None:
        self._turn = turn
        self._index = index
        self._precedence = PrefillPriority()
        self._requests = 0
        self._need: float | None = None
        self._wanting = False
        self._told_want = False
        self._prefills = False
        self._behind_prefill = False
        """True while its decodes wait for a prefill step of another engine."""
        self._alone = turn is None

    def pace_now(self) -> PrefillThrottle | None:
        if self._turn is None:
            return FREE
        return self._turn.throttle(self._index)

    def gives_way_now(self) -> bool:
        if self._turn is None:
            return False
        now = time.monotonic()
        self._alone = False
        prompts = self._turn.claimed(self._index, now)
        claimed = worth(prompts, self._requests, self._turn.prefill_priority_batch)
        self._behind_prefill = claimed and self._precedence.waits(True, now, self._turn.prefill_priority_s)
        self._tell_want(now)
        if claimed:
            return self._behind_prefill
        is_others = False
        if self._need is not None:
            own, others = wanted(self._index, self._need, self._requests), self._turn.wanting(self._index, now)
            is_others = decode_arbitration.waits(own, self._wanting, others)
            self._alone = not prompts and decode_arbitration.alone(own, self._wanting, others)
        return self._precedence.waits(is_others, now, self._turn.decode_arbitration_s)

    def alone(self) -> bool:
        return self._alone

    def decodes(self, requests: int, need: float | None, wanting: bool) -> None:
        self._requests, self._need, self._wanting = requests, need, wanting
        self._tell_want(time.monotonic())

    def _tell_want(self, now: float) -> None:
        """Publishes the bid, or withdraws it. An engine that prefills, or whose decodes wait for a neighbour's prefill
        step, makes none meanwhile: neighbours would wait for a decode step that does not come."""
        wants = self._need is not None and self._wanting and not self._prefills and not self._behind_prefill
        if self._turn is not None and (wants or self._told_want) and self._turn.decode_arbitration_s > 0:
            self._turn.want(self._index, self._need if wants else None, now, self._requests)
            self._told_want = wants

    def stepped(self) -> None:
        self._precedence.stepped()

    def claim(self, prompts: int) -> None:
        self._prefills = True
        if self._turn is not None:
            now = time.monotonic()
            self._turn.claim(self._index, now, prompts)
            self._tell_want(now)

    def release(self) -> None:
        self._prefills = False
        if self._turn is not None:
            self._turn.release(self._index)


class Alone(_Turn):
    """An engine of one process: it agrees with no other rank and pays nothing for that."""

    rank, size = 0, 1
    agreed = StepAgreement()
    now = staticmethod(time.monotonic)
    pace = _Turn.pace_now
    gives_way = _Turn.gives_way_now

    def listen(self, facts: Callable[[], RankFacts], wake_fd: int = -1) -> None:
        pass

    def decode_step(self, own: DecodeStep) -> DecodeStep:
        return own

    def seed(self) -> int:
        return secrets.randbits(63)

    def begin(self) -> None:
        pass

    def gather(self, own: T) -> list[T]:
        return [own]

    def settle(self, failure: CommandError | None, timeout_s: float | None = None) -> None:
        if failure is not None:
            raise failure


@dataclass(frozen=True)
class _Failed:
    """The message of a rank that failed, in place of its value in an exchange."""

    error: CommandError


@dataclass(frozen=True)
class _Step:
    """The message by which rank 0 begins a step."""

    number: int
    now: float
    pace: PrefillThrottle | None
    gives_way: bool
    decode_step: DecodeStep
    messages: tuple[bytes, ...]
    closed: bool
    agreed: StepAgreement


class _Several(ABC):
    """The common part of rank 0 and the other ranks."""

    rank: int
    size: int

    def __init__(self) -> None:
        self._facts: Callable[[], RankFacts] = RankFacts
        self._wake_fd = -1
        self._step = _Step(0, time.monotonic(), None, False, DecodeStep(), (), False, StepAgreement())
        self._random = random.Random()
        self._decode_step = DecodeStep()
        """Duration of a decode step that has the device to itself, as this rank knows it."""

    @property
    def agreed(self) -> StepAgreement:
        return self._step.agreed

    def listen(self, facts: Callable[[], RankFacts], wake_fd: int = -1) -> None:
        self._facts, self._wake_fd = facts, wake_fd

    def now(self) -> float:
        return self._step.now

    def pace(self) -> PrefillThrottle | None:
        return self._step.pace

    def gives_way(self) -> bool:
        return self._step.gives_way

    def decode_step(self, own: DecodeStep) -> DecodeStep:
        self._decode_step = own
        return self._step.decode_step

    def seed(self) -> int:
        return self._random.getrandbits(63)

    def gather(self, own: T) -> list[T]:
        told = self._exchange(own, None)
        _raise_first(told, None)
        return told

    def settle(self, failure: CommandError | None, timeout_s: float | None = None) -> None:
        if failure is not None and failure.settled:
            raise failure
        own = None if failure is None else _Failed(type(failure)(str(failure)))
        _raise_first(self._exchange(own, timeout_s), failure)

    @abstractmethod
    def _exchange(self, own: Any, timeout_s: float | None) -> list[Any]:
        """Collects `own` of every rank, in the order of ranks. All ranks must call it, whatever each of them sends."""

    def begin(self) -> None:
        self._random.seed(self.gather(secrets.randbits(64))[0])


class Leader(_Several, _Turn):
    """Rank 0 of several: it has the channel and the board, and begins every step."""

    rank = 0

    def __init__(self, others: Sequence[int], turn: SharedBoard | None, index: int) -> None:
        """`others`: descriptors of the sockets to ranks 1, 2, ...; `turn`: the board shared with neighbour engines;
        `index`: this engine's number on it."""
        _Several.__init__(self)
        _Turn.__init__(self, turn, index)
        self.size = 1 + len(others)
        self._others = [Connection(fd) for fd in others]
        self._told: list[RankFacts | None] = [None] * len(others)
        """Facts of ranks 1, 2, ... for the next step; None: not received yet."""

    def step(self, messages: Sequence[bytes], closed: bool) -> None:
        """Begins a step, in which all ranks act on these messages. Raises SystemExit if the ranks have decided
        differently."""
        number = self._step.number + 1
        for index, facts in enumerate(self._told):
            while facts is None:
                facts = self._hear(index)
        try:
            agreed = agree([self._facts(), *(facts for facts in self._told if facts is not None)])
        except RanksDisagree as error:
            raise SystemExit(str(error)) from None
        now = time.monotonic()
        pace, gives_way = self.pace_now(), self.gives_way_now()
        self._step = _Step(number, now, pace, gives_way, self._decode_step, tuple(messages), closed, agreed)
        self._told = [None] * len(self._others)
        self._tell(self._step)

    def _hear(self, index: int) -> RankFacts | None:
        """Waits for the next message of one rank and returns its facts for the next step, if it has sent them. Raises
        SystemExit if that rank failed."""
        number, facts = _receive(self._others[index])
        if number == _EXCHANGE:
            raise SystemExit(f"rank {1 + index} of this engine failed in the middle of a step")
        if number == self._step.number + 1:
            self._told[index] = facts
        return self._told[index]

    def _tell(self, what: object) -> None:
        """Sends the same object to all other ranks."""
        data = pickle.dumps(what)
        for other in self._others:
            _send(other, data)

    def _exchange(self, own: Any, timeout_s: float | None) -> list[Any]:
        told = [own]
        for other in self._others:
            while True:
                number, value = _receive(other, timeout_s)
                if number == _EXCHANGE:
                    break
            told.append(value)
        self._tell(told)
        return told

    # --- while idle

    @property
    def fds(self) -> list[int]:
        """Descriptors of the sockets to the other ranks."""
        return [other.fileno() for other in self._others]

    def news(self) -> bool:
        """Whether another rank has news or memory to return, so that the next step should begin. Never waits."""
        for index, other in enumerate(self._others):
            while other.poll(0):
                self._hear(index)
        return any(facts is not None and (facts.news or facts.wanted > 0) for facts in self._told)


class Follower(_Several):
    """Any rank but the first."""

    def __init__(self, leader: int, rank: int, size: int) -> None:
        """`leader`: descriptor of the socket to rank 0."""
        super().__init__()
        self.rank = rank
        self.size = size
        self._leader = Connection(leader)

    def pace_now(self) -> PrefillThrottle | None:
        """The throttle that rank 0 sent for this step."""
        return self.pace()

    def gives_way_now(self) -> bool:
        """Whether decodes wait, as rank 0 sent for this step."""
        return self.gives_way()

    def stepped(self) -> None:
        """Does nothing: rank 0 counts steps."""

    def decodes(self, requests: int, need: float | None, wanting: bool) -> None:
        """Does nothing: rank 0 publishes the bid."""

    def alone(self) -> bool:
        """False: only rank 0 knows."""
        return False

    def claim(self, prompts: int) -> None:
        """Does nothing: rank 0 makes the claim."""

    def release(self) -> None:
        """Does nothing: rank 0 ends the claim."""

    def step(self) -> _Step:
        """Waits until rank 0 begins the next step, and tells it meanwhile when there is something new here."""
        number = self._step.number + 1
        facts = self._facts()
        self._tell(number, facts)
        if self._wake_fd >= 0 and not facts.news:
            poll = select.poll()
            poll.register(self._leader.fileno(), select.POLLIN)
            poll.register(self._wake_fd, select.POLLIN)
            if self._leader.fileno() not in dict(poll.poll()):
                self._tell(number, replace(facts, news=True))
        self._step = _receive(self._leader)
        return self._step

    def _tell(self, number: int, what: object) -> None:
        """Sends rank 0 an object for step `number`, or for an exchange."""
        _send(self._leader, pickle.dumps((number, what)))

    def _exchange(self, own: Any, timeout_s: float | None) -> list[Any]:
        self._tell(_EXCHANGE, own)
        told: list[Any] = _receive(self._leader, timeout_s)
        return told


_EXCHANGE = 0
"""The number of an exchange, in place of a step's."""


def _raise_first(told: Sequence[Any], own: CommandError | None) -> None:
    """Raises the failure of a rank, if one has failed: `own`, or else the first one's."""
    first = next((one.error for one in told if isinstance(one, _Failed)), None)
    if first is not None:
        error = own or first
        error.settled = True
        raise error


def _send(other: Connection, data: bytes) -> None:
    """Sends to another rank. Raises SystemExit if that rank is gone."""
    try:
        other.send_bytes(data)
    except OSError:
        raise SystemExit("another rank of this engine is gone") from None


def _receive(other: Connection, timeout_s: float | None = None) -> Any:
    """Waits for an object from another rank. Raises SystemExit if that rank is gone, or sends nothing for `timeout_s`
    seconds."""
    try:
        if timeout_s is not None and not other.poll(timeout_s):
            raise SystemExit(f"another rank of this engine said nothing for {timeout_s:.0f} s")
        return pickle.loads(other.recv_bytes())
    except (EOFError, OSError):
        raise SystemExit("another rank of this engine is gone") from None
