"""The arbiter of an engine over a real board, with neighbours that are only their words there."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import pytest

from gpu_scheduler.engines import shared_board
from gpu_scheduler.engines.sglang.ranks.ranks import Alone
from gpu_scheduler.engines.sglang.step.arbiter import Arbiter
from gpu_scheduler.engines.shared_board import BoardSeat, SharedBoard
from gpu_scheduler.engines.sharing.solo_step_time import DecodeStep
from gpu_scheduler.engines.sharing.step_gate import StepAnswer, StepWait, WaitReason
from gpu_scheduler.engines.sharing.throttle import FREE, PrefillThrottle
from gpu_scheduler.engines.sharing.tpot_slack import Stream

INDEX, NEIGHBOUR, ANOTHER = 1, 2, 3
FOR_EVER_S = 1000.0
TARGET = PrefillThrottle(step_s=0.010)


@pytest.fixture
def board() -> Iterator[SharedBoard]:
    """Engines wait for neighbours as long as it takes. Bids last: one is made with each look, and a machine may be
    slower than the 50 ms that it holds otherwise."""
    fd = shared_board.create()
    board = SharedBoard(fd, bid_s=FOR_EVER_S)
    board.set_prefill_priority(FOR_EVER_S, 16)
    board.set_decode_arbitration(FOR_EVER_S)
    for index in (INDEX, NEIGHBOUR, ANOTHER):
        board.set_throttle(index, TARGET)
    yield board
    os.close(fd)


class Ranks(Alone):
    """Ranks of several, whose agreed facts a test sets."""

    size = 2

    def __init__(self, rank: int, answer: StepAnswer) -> None:
        self.rank, self.answer = rank, answer
        self.question: Callable[[], StepAnswer] = StepAnswer

    def ask(self, question: Callable[[], StepAnswer]) -> None:
        self.question = question


@dataclass
class Engine:
    arbiter: Arbiter
    need: float

    def decode(self, requests: int = 1) -> StepWait | None:
        """Whether its next decode step waits, while all its requests are behind their target."""
        now = time.monotonic()
        self.arbiter.look()
        # With a first token a second ago, and seconds until it is given up.
        self.arbiter.observe([Stream(now - 1.0, 98)], self.need * TARGET.step_s, now)
        self.arbiter.decoding(requests, now)
        return self.arbiter.decode()


def engine(board: SharedBoard, index: int = INDEX, need: float = 0.4, *, proving: bool = False) -> Engine:
    return Engine(Arbiter(Alone(), BoardSeat(board, index), lambda: proving), need)


def reason(wait: StepWait | None) -> WaitReason | None:
    return None if wait is None else wait.why


def test_decode_behind_a_claimed_prefill_waits_until_it_is_released(board: SharedBoard) -> None:
    own = engine(board)
    board.claim(NEIGHBOUR, time.monotonic(), 1)
    assert reason(own.decode()) is WaitReason.NEIGHBOUR_PREFILL
    assert own.decode(17) is None, "too many requests for one prompt"
    board.release(NEIGHBOUR)
    assert own.decode() is None


def test_claim_of_an_own_prefill_stops_neighbours_and_no_own_step(board: SharedBoard) -> None:
    own = engine(board)
    own.arbiter.look()
    own.arbiter.prefill_begins(3)
    assert board.claimed(NEIGHBOUR, time.monotonic()) == 3 and own.decode() is None
    assert not own.arbiter.prefill_ended()
    own.arbiter.release()
    assert board.claimed(NEIGHBOUR, time.monotonic()) == 0


def test_bid_of_an_engine_that_prefills_or_stands_still_for_a_prefill_is_withdrawn(board: SharedBoard) -> None:
    own = engine(board)

    def bids(requests: int) -> bool:
        own.decode(requests)
        return bool(board.bids(NEIGHBOUR, time.monotonic()))

    assert bids(16)
    board.claim(NEIGHBOUR, time.monotonic(), 1)
    assert not bids(16), "others would wait for a step that is not made"
    assert bids(17), "they are too many to stand still"
    board.release(NEIGHBOUR)
    assert bids(16)
    own.arbiter.prefill_begins(1)
    assert not bids(16), "its own prompts come first"
    own.arbiter.prefill_ended()
    own.arbiter.release()
    assert bids(16)
    own.arbiter.decoding(0, time.monotonic())
    assert not board.bids(NEIGHBOUR, time.monotonic()), "nothing decodes any more"


def test_decode_of_many_requests_goes_on_beside_few_that_stand_still_for_the_same_prefill(board: SharedBoard) -> None:
    few, many = engine(board, INDEX, 0.04), engine(board, NEIGHBOUR, 0.9)

    def look() -> tuple[WaitReason | None, WaitReason | None]:
        few.decode(1)
        many.decode(17)
        return reason(few.decode(1)), reason(many.decode(17))

    assert look() == (None, WaitReason.NEIGHBOUR_DECODES), "the few need less for each"
    board.claim(ANOTHER, time.monotonic(), 1)
    assert look() == (WaitReason.NEIGHBOUR_PREFILL, None)
    board.release(ANOTHER)
    assert look() == (None, WaitReason.NEIGHBOUR_DECODES)


def test_decode_without_arbitration_makes_no_bid_and_waits_for_none(board: SharedBoard) -> None:
    board.set_decode_arbitration(0.0)
    few, many = engine(board, INDEX, 0.6), engine(board, NEIGHBOUR, 0.9)
    assert (few.decode(), many.decode(), board.bids(ANOTHER, time.monotonic())) == (None, None, [])


def test_throttle_and_waits_of_a_model_that_is_being_proven_are_none(board: SharedBoard) -> None:
    board.set_throttle(INDEX, PrefillThrottle(128, 1e6, 0.010))
    board.claim(NEIGHBOUR, time.monotonic(), 1)
    own = engine(board, proving=True)
    assert own.arbiter.throttle == FREE and own.decode() is None
    own.arbiter.prefill_begins(1)
    own.arbiter.prefill_ended()
    own.arbiter.look()
    assert own.arbiter.prefill(lambda: True) is None


def test_pause_that_is_lifted_while_a_rank_waits_for_it_is_over_at_once(board: SharedBoard) -> None:
    board.set_throttle(INDEX, PrefillThrottle(128, 1e9))
    own = engine(board)
    own.arbiter.look()
    own.arbiter.prefill_begins(1)
    own.arbiter.prefill_ended()
    own.arbiter.look()
    assert reason(own.arbiter.pause()) is reason(own.arbiter.pause_now()) is WaitReason.PAUSE
    assert reason(own.arbiter.prefill(lambda: False)) is WaitReason.PAUSE
    board.set_throttle(INDEX, FREE)
    assert own.arbiter.pause_now() is None


def test_prefill_behind_own_decodes_waits_unless_these_wait_themselves(board: SharedBoard) -> None:
    own = engine(board)
    own.arbiter.look()
    own.arbiter.prefill_begins(1)
    own.decode()
    assert reason(own.arbiter.prefill(lambda: True)) is WaitReason.OWN_DECODES
    assert own.arbiter.prefill(lambda: False) is None, "nothing goes on"
    board.claim(NEIGHBOUR, time.monotonic(), 1)
    assert own.arbiter.prefill(lambda: True) is None


def test_first_of_several_ranks_answers_from_the_board_and_all_go_by_what_it_answered(board: SharedBoard) -> None:
    first = Ranks(0, StepAnswer())
    own = Engine(Arbiter(first, BoardSeat(board, INDEX), lambda: False), 0.4)
    own.decode()
    board.claim(NEIGHBOUR, time.monotonic(), 1)
    answer = first.question()
    assert (answer.throttle, reason(answer.decode)) == (TARGET, WaitReason.NEIGHBOUR_PREFILL)
    assert answer.solo_step == DecodeStep(0.4 * TARGET.step_s)
    assert own.arbiter.decode() is None, "the answer is for the next step"
    assert reason(own.arbiter.decode_now()) is WaitReason.NEIGHBOUR_PREFILL
    private = SharedBoard(shared_board.create())
    other = Arbiter(Ranks(1, answer), BoardSeat(private, 0), lambda: False)
    assert (other.decode(), other.decode_now(), other.throttle) == (answer.decode, answer.decode, TARGET)
    other.observe([], 0.1, 100.0)
    assert other.progress.step == answer.solo_step
