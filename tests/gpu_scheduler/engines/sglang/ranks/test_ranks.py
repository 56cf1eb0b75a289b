"""Ranks of one engine, as threads with nothing to compute."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest

from gpu_scheduler.engines import shared_board
from gpu_scheduler.engines.sglang.base.errors import BrokenModel, CommandError, NoMemory
from gpu_scheduler.engines.sglang.policy.agreement import RankFacts
from gpu_scheduler.engines.sglang.ranks.channel import FollowerChannel, LeaderChannel
from gpu_scheduler.engines.sglang.ranks.ranks import Alone, Follower, Leader
from gpu_scheduler.engines.sharing.solo_step_time import DecodeStep
from protos import engine_pb2
from services.ipc.framing import frame

WAIT_S = 60.0


class Three:
    """A leader, its two followers, and the gpu_scheduler's end of the socket."""

    def __init__(self, words: shared_board.SharedBoard | None = None) -> None:
        pairs = [socket.socketpair() for _ in range(2)]
        self.parent, channel = socket.socketpair()
        self.leader = Leader([first.detach() for first, _ in pairs], words, 1)
        self.followers = [Follower(pair[1].detach(), rank, 3) for rank, pair in enumerate(pairs, start=1)]
        self.channels: list[Any] = [LeaderChannel(channel.detach(), self.leader)]
        self.channels += [FollowerChannel(follower) for follower in self.followers]
        self._threads = ThreadPoolExecutor(3)

    @property
    def ranks(self) -> list[Any]:
        return [self.leader, *self.followers]

    def start(self, work: Callable[[int], Any]) -> list[Future[Any]]:
        return [self._threads.submit(work, rank) for rank in range(3)]

    def all(self, work: Callable[[int], Any]) -> list[Any]:
        return [future.result(WAIT_S) for future in self.start(work)]

    def hang_up(self) -> None:
        """As the death of the first does."""
        for other in self.leader._others:
            other.close()

    def say(self, text: str) -> None:
        self.parent.send(frame(engine_pb2.ToEngine(abort=engine_pb2.Abort(request_id=text))))


def heard(messages: list[engine_pb2.ToEngine]) -> list[str]:
    return [message.abort.request_id for message in messages]


def test_what_the_first_receives_all_act_on_at_the_same_step_and_time() -> None:
    three = Three()
    three.say("a")
    three.say("b")

    def step(rank: int) -> tuple[list[str], float]:
        return heard(three.channels[rank].receive()), three.ranks[rank].now()

    first = three.all(step)
    assert first[0][0] == ["a", "b"] and first.count(first[0]) == 3
    second = three.all(step)
    assert second[0][0] == [] and second.count(second[0]) == 3 and second[0][1] > first[0][1]


def test_the_worst_off_decides_for_all() -> None:
    three = Three()
    for rank, (limit, wanted) in zip(three.ranks, [(300, 0), (100, 7), (200, 5)], strict=True):
        rank.listen(lambda limit=limit, wanted=wanted: RankFacts(wanted=wanted, limit=limit))
    three.all(lambda rank: three.channels[rank].receive())
    assert {(rank.agreed.limit, rank.agreed.wanted) for rank in three.ranks} == {(100, 7)}


def test_all_ranks_give_way_in_the_same_step_and_the_first_one_claims_for_all() -> None:
    fd = shared_board.create()
    words, three = shared_board.SharedBoard(fd), Three(shared_board.SharedBoard(fd))
    words.set_prefill_priority(1000.0, 0)
    words.claim(2, time.monotonic(), 1)
    three.all(lambda rank: three.channels[rank].receive())
    assert [rank.gives_way() for rank in three.ranks] == [True] * 3
    words.release(2)
    assert [rank.gives_way() for rank in three.ranks] == [True] * 3, "in this step"
    assert not three.leader.gives_way_now()
    three.all(lambda rank: three.channels[rank].receive())
    assert [rank.gives_way() for rank in three.ranks] == [False] * 3
    for rank in three.ranks:
        rank.claim(1)
    assert words.claimed(2, time.monotonic()) and not three.leader.gives_way_now()
    three.followers[0].release()
    assert words.claimed(2, time.monotonic())
    three.leader.release()
    assert not words.claimed(2, time.monotonic())


def test_who_decodes_for_many_requests_waits_for_as_many_more_prompts_and_has_no_device_for_itself_without() -> None:
    fd = shared_board.create()
    words, three = shared_board.SharedBoard(fd), Three(shared_board.SharedBoard(fd))
    words.set_prefill_priority(1000.0, 16)

    def give_way(requests: int, prompts: int) -> list[bool]:
        words.claim(2, time.monotonic(), prompts)
        for rank in three.ranks:
            rank.decodes(requests, 0.5, True)
        three.all(lambda rank: three.channels[rank].receive())
        return [rank.gives_way() for rank in three.ranks]

    assert give_way(16, 1) == [True] * 3
    assert give_way(17, 1) == [False] * 3 and not three.leader.alone()
    assert give_way(17, 2) == [True] * 3
    words.set_prefill_priority(1000.0, 0)
    assert give_way(1000, 1) == [True] * 3, "however many"


@pytest.fixture
def wants_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    """However late whoever looks is here: who wants says so no more than once."""
    monkeypatch.setattr(shared_board, "_WANTED_S", 1000.0)


@pytest.mark.usefixtures("wants_for_ever")
def test_who_stands_still_for_a_prefill_or_prefills_itself_wants_nothing_meanwhile() -> None:
    fd = shared_board.create()
    words, own = shared_board.SharedBoard(fd), Alone(shared_board.SharedBoard(fd), 1)
    words.set_prefill_priority(1000.0, 16)
    words.set_decode_arbitration(1000.0)

    def wanted_with(requests: int) -> bool:
        own.decodes(requests, 0.4, True)
        own.gives_way_now()
        return bool(words.wanting(3, time.monotonic()))

    assert wanted_with(16)
    words.claim(2, time.monotonic(), 1)
    assert not wanted_with(16), "others would wait for a step that is not made"
    assert wanted_with(17), "they are too many to stand still"
    words.release(2)
    assert wanted_with(16)
    own.claim(1)
    assert not wanted_with(16), "its own prompts come first"
    own.release()
    assert wanted_with(16)


@pytest.mark.usefixtures("wants_for_ever")
def test_who_decodes_for_too_many_requests_goes_on_beside_one_that_stands_still_for_the_same_prefill() -> None:
    fd = shared_board.create()
    words = shared_board.SharedBoard(fd)
    words.set_prefill_priority(1000.0, 16)
    words.set_decode_arbitration(1000.0)
    few, many = Alone(shared_board.SharedBoard(fd), 1), Alone(shared_board.SharedBoard(fd), 2)

    def look() -> tuple[bool, bool]:
        few.decodes(1, 0.04, True)
        many.decodes(17, 0.9, True)
        return few.gives_way_now(), many.gives_way_now()

    assert look() == (False, True), "the few need less for each"
    words.claim(3, time.monotonic(), 1)
    assert look() == (True, False)
    words.release(3)
    assert look() == (False, True)


@pytest.mark.usefixtures("wants_for_ever")
def test_all_ranks_stand_still_in_the_same_step_for_a_neighbour_that_needs_less_and_the_first_one_tells() -> None:
    fd = shared_board.create()
    words, three = shared_board.SharedBoard(fd), Three(shared_board.SharedBoard(fd))
    words.set_decode_arbitration(1000.0)

    def give_way(need: float | None, wanting: bool) -> list[bool]:
        words.want(2, 0.55, time.monotonic())
        for rank in three.ranks:
            rank.decodes(1, need, wanting)
        three.all(lambda rank: three.channels[rank].receive())
        return [rank.gives_way() for rank in three.ranks]

    assert give_way(0.6, True) == [True] * 3
    assert words.wanting(2, time.monotonic()) == [shared_board.wanted(1, 0.6)]
    assert not three.leader.alone()
    assert give_way(0.4, True) == [False] * 3
    assert three.leader.alone(), "the other stands still"
    assert give_way(0.4, False) == [True] * 3, "it is ahead of its target"
    assert words.wanting(2, time.monotonic()) == []
    assert give_way(None, False) == [False] * 3, "it has no target"
    words.want(2, None, time.monotonic())
    words.want(3, 0.4, time.monotonic())
    words.set_decode_arbitration(0.0)
    assert give_way(0.6, True) == [False] * 3


def test_all_ranks_go_by_what_the_first_one_knew_of_decode_steps_before_this_step() -> None:
    three = Three()

    def known(first: DecodeStep) -> list[DecodeStep]:
        own = (first, DecodeStep(0.005, True), DecodeStep())
        return [rank.decode_step(each) for rank, each in zip(three.ranks, own, strict=True)]

    assert known(DecodeStep(0.008, True)) == [DecodeStep()] * 3
    three.all(lambda rank: three.channels[rank].receive())
    assert known(DecodeStep(0.009)) == [DecodeStep(0.008, True)] * 3


def test_an_idle_engine_goes_on_when_any_rank_has_news() -> None:
    three = Three()
    doorbell = os.eventfd(0)
    three.followers[1].listen(RankFacts, doorbell)
    steps = three.start(lambda rank: three.channels[rank].wait(None) and three.channels[rank].receive())
    assert not any(step.done() for step in steps)
    os.eventfd_write(doorbell, 1)
    assert [step.result(WAIT_S) for step in steps] == [[], [], []]


def test_messages_that_one_kept_for_later_all_kept() -> None:
    three = Three()
    three.say("a")

    def keep(rank: int) -> list[str]:
        channel = three.channels[rank]
        channel.unread(channel.receive())
        channel.wait(None)
        return heard(channel.receive())

    assert three.all(keep) == [["a"]] * 3


def test_what_fails_on_one_rank_fails_on_all_and_the_first_says_why() -> None:
    three = Three()
    failures = [None, None, BrokenModel("a tensor is missing")]

    def settle(rank: int) -> CommandError | None:
        try:
            three.ranks[rank].settle(failures[rank])
        except CommandError as error:
            return error
        return None

    assert [(type(e), str(e)) for e in three.all(settle)] == [(BrokenModel, "a tensor is missing")] * 3
    failures[:] = [None, NoMemory("here too"), NoMemory("here")]
    assert [str(error) for error in three.all(settle)] == ["here too", "here too", "here"]
    failures[:] = [None, None, None]
    assert three.all(settle) == [None, None, None]


def test_a_rank_that_fails_on_its_way_to_where_the_others_agree_fails_them_all() -> None:
    three = Three()

    def build(rank: int) -> str:
        try:
            try:
                if rank == 2:
                    raise NoMemory("it has none")
                three.ranks[rank].gather("a limit")
                three.ranks[rank].settle(None)
            except CommandError as error:
                three.ranks[rank].settle(error)
        except CommandError as error:
            return f"{type(error).__name__}: {error}, then {three.ranks[rank].gather(rank)}"
        return "built"

    assert three.all(build) == ["NoMemory: it has none, then [0, 1, 2]"] * 3


def test_a_rank_that_fails_in_the_middle_of_a_step_ends_the_engine() -> None:
    three = Three()
    steps = three.start(
        lambda rank: three.ranks[rank].settle(NoMemory("no more")) if rank == 1 else three.channels[rank].receive()
    )
    with pytest.raises(SystemExit, match="rank 1 of this engine failed in the middle of a step"):
        steps[0].result(WAIT_S)
    three.hang_up()
    assert all(isinstance(step.exception(WAIT_S), SystemExit) for step in steps[1:])


def test_seeds_that_nobody_named_are_the_same_everywhere() -> None:
    three = Three()
    three.all(lambda rank: three.ranks[rank].begin())
    seeds = three.all(lambda rank: [three.ranks[rank].seed() for _ in range(3)])
    assert seeds.count(seeds[0]) == 3 and len(set(seeds[0])) == 3


def test_a_rank_that_is_gone_ends_those_who_wait_for_it_or_tell_it() -> None:
    three = Three()
    three.followers[0]._leader.close()
    with pytest.raises(SystemExit, match="another rank of this engine is gone"):
        three.leader.step([], False)
    with pytest.raises(SystemExit, match="another rank of this engine is gone"):
        three.leader._tell("what holds")


def test_ranks_that_parted_end() -> None:
    three = Three()
    for number, rank in enumerate(three.ranks):
        rank.listen(lambda number=number: RankFacts(mark=number))
    steps = three.start(lambda rank: three.channels[rank].receive() if rank else three.leader.step([], False))
    with pytest.raises(SystemExit, match="parted"):
        steps[0].result(WAIT_S)
    three.hang_up()
    assert all(isinstance(step.exception(WAIT_S), SystemExit) for step in steps[1:])
