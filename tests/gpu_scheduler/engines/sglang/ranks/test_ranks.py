"""Ranks of one engine, as threads with nothing to compute."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest

from gpu_scheduler.engines.sglang.base.errors import BrokenModel, CommandError, NoMemory
from gpu_scheduler.engines.sglang.policy.agreement import RankFacts
from gpu_scheduler.engines.sglang.ranks.channel import FollowerChannel, LeaderChannel
from gpu_scheduler.engines.sglang.ranks.ranks import Follower, Leader
from gpu_scheduler.engines.sharing.solo_step_time import DecodeStep
from gpu_scheduler.engines.sharing.step_gate import StepAnswer, StepWait, WaitReason
from gpu_scheduler.engines.sharing.throttle import PrefillThrottle
from protos import engine_pb2
from services.ipc.framing import frame
from testing.patience import PATIENCE_S


class Three:
    """A leader, its two followers, and the gpu_scheduler's end of the socket."""

    def __init__(self) -> None:
        pairs = [socket.socketpair() for _ in range(2)]
        self.parent, channel = socket.socketpair()
        self.leader = Leader([first.detach() for first, _ in pairs])
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
        return [future.result(PATIENCE_S) for future in self.start(work)]

    def hang_up(self) -> None:
        """As the death of the first does."""
        for other in self.leader._others:
            other.close()

    def say(self, text: str) -> None:
        self.parent.send(frame(engine_pb2.ToEngine(abort=engine_pb2.Abort(request_id=text))))


def heard(messages: list[engine_pb2.ToEngine]) -> list[str]:
    return [message.abort.request_id for message in messages]


def test_messages_to_the_first_rank_reach_all_ranks_at_the_same_step_and_time() -> None:
    three = Three()
    three.say("a")
    three.say("b")

    def step(rank: int) -> tuple[list[str], float]:
        return heard(three.channels[rank].receive()), three.ranks[rank].now()

    first = three.all(step)
    assert first[0][0] == ["a", "b"] and first.count(first[0]) == 3
    second = three.all(step)
    assert second[0][0] == [] and second.count(second[0]) == 3 and second[0][1] > first[0][1]


def test_lowest_limit_and_highest_demand_of_any_rank_hold_for_all() -> None:
    three = Three()
    for rank, (limit, wanted) in zip(three.ranks, [(300, 0), (100, 7), (200, 5)], strict=True):
        rank.listen(lambda limit=limit, wanted=wanted: RankFacts(wanted=wanted, limit=limit))
    three.all(lambda rank: three.channels[rank].receive())
    assert {(rank.agreed.limit, rank.agreed.wanted) for rank in three.ranks} == {(100, 7)}


def test_answers_of_the_first_rank_hold_for_all_in_the_same_step() -> None:
    three = Three()
    answers = [
        StepAnswer(PrefillThrottle(128), StepWait(7.0, WaitReason.NEIGHBOUR_DECODES), DecodeStep(0.008, True)),
        StepAnswer(),
    ]
    for rank in three.ranks[1:]:
        rank.ask(lambda: StepAnswer(PrefillThrottle(1)))  # nobody asks them
    three.leader.ask(lambda: answers[0])
    assert [rank.answer for rank in three.ranks] == [StepAnswer()] * 3, "before the first step"
    for answer in list(answers):
        three.all(lambda rank: three.channels[rank].receive())
        assert [rank.answer for rank in three.ranks] == [answer] * 3
        answers.pop(0)
        assert [rank.answer for rank in three.ranks] == [answer] * 3, "until the next step"


def test_an_idle_engine_goes_on_when_any_rank_has_news() -> None:
    three = Three()
    doorbell = os.eventfd(0)
    three.followers[1].listen(RankFacts, doorbell)
    steps = three.start(lambda rank: three.channels[rank].wait(None) and three.channels[rank].receive())
    assert not any(step.done() for step in steps)
    os.eventfd_write(doorbell, 1)
    assert [step.result(PATIENCE_S) for step in steps] == [[], [], []]


def test_messages_that_ranks_put_back_come_again_to_all_of_them() -> None:
    three = Three()
    three.say("a")

    def keep(rank: int) -> list[str]:
        channel = three.channels[rank]
        channel.unread(channel.receive())
        channel.wait(None)
        return heard(channel.receive())

    assert three.all(keep) == [["a"]] * 3


def test_failure_of_one_rank_fails_all_with_the_reason_of_the_first_that_failed() -> None:
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


def test_rank_that_fails_while_others_wait_to_agree_fails_them_all() -> None:
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
        steps[0].result(PATIENCE_S)
    three.hang_up()
    assert all(isinstance(step.exception(PATIENCE_S), SystemExit) for step in steps[1:])


def test_seeds_not_given_by_a_request_are_the_same_on_all_ranks() -> None:
    three = Three()
    three.all(lambda rank: three.ranks[rank].begin())
    seeds = three.all(lambda rank: [three.ranks[rank].seed() for _ in range(3)])
    assert seeds.count(seeds[0]) == 3 and len(set(seeds[0])) == 3


def test_rank_that_is_gone_ends_the_ranks_that_wait_for_it_or_send_to_it() -> None:
    three = Three()
    three.followers[0]._leader.close()
    with pytest.raises(SystemExit, match="another rank of this engine is gone"):
        three.leader.step([], False)
    with pytest.raises(SystemExit, match="another rank of this engine is gone"):
        three.leader._tell("what holds")


def test_ranks_whose_decisions_differ_end_at_the_next_step() -> None:
    three = Three()
    for number, rank in enumerate(three.ranks):
        rank.listen(lambda number=number: RankFacts(mark=number))
    steps = three.start(lambda rank: three.channels[rank].receive() if rank else three.leader.step([], False))
    with pytest.raises(SystemExit, match="parted"):
        steps[0].result(PATIENCE_S)
    three.hang_up()
    assert all(isinstance(step.exception(PATIENCE_S), SystemExit) for step in steps[1:])
