"""The ranks of one engine: processes that compute one model together, one on each of its devices.

SGLang's scheduler runs in each of them and decides for itself. So before every step all ranks tell rank 0 what is new
with them, and rank 0 tells all what holds for the step: the gpu_scheduler's messages, the time, the step gate's answer
about throttle and neighbours (`engines/sharing/step_gate.py`), and the memory that every rank has. In between, what may
fail on one rank (mapping, checksums) is done by all and then agreed on.

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
from gpu_scheduler.engines.sharing.step_gate import StepAnswer

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

    def ask(self, question: Callable[[], StepAnswer]) -> None:
        """Registers `question`, which rank 0 of several answers for all before every step."""
        ...

    @property
    def answer(self) -> StepAnswer:
        """Rank 0's answer for this step; with one rank, which needs none from another, an empty one."""
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


class Alone:
    """An engine of one process: it agrees with no other rank and pays nothing for that."""

    rank, size = 0, 1
    agreed = StepAgreement()
    now = staticmethod(time.monotonic)

    answer = StepAnswer()

    def listen(self, facts: Callable[[], RankFacts], wake_fd: int = -1) -> None:
        pass

    def ask(self, question: Callable[[], StepAnswer]) -> None:
        pass

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
    answer: StepAnswer
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
        self._step = _Step(0, time.monotonic(), StepAnswer(), (), False, StepAgreement())
        self._random = random.Random()

    @property
    def agreed(self) -> StepAgreement:
        return self._step.agreed

    def listen(self, facts: Callable[[], RankFacts], wake_fd: int = -1) -> None:
        self._facts, self._wake_fd = facts, wake_fd

    def now(self) -> float:
        return self._step.now

    @property
    def answer(self) -> StepAnswer:
        return self._step.answer

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


class Leader(_Several):
    """Rank 0 of several: it has the channel and the board, and begins every step."""

    rank = 0

    def __init__(self, others: Sequence[int]) -> None:
        """`others`: descriptors of the sockets to ranks 1, 2, ..."""
        super().__init__()
        self._question: Callable[[], StepAnswer] = StepAnswer
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
        self._step = _Step(number, now, self._question(), tuple(messages), closed, agreed)
        self._told = [None] * len(self._others)
        self._tell(self._step)

    def ask(self, question: Callable[[], StepAnswer]) -> None:
        self._question = question

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

    def ask(self, question: Callable[[], StepAnswer]) -> None:
        """Does nothing: rank 0 asks."""

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
            raise SystemExit(f"another rank of this engine sent nothing for {timeout_s:.0f} s")
        return pickle.loads(other.recv_bytes())
    except (EOFError, OSError):
        raise SystemExit("another rank of this engine is gone") from None
