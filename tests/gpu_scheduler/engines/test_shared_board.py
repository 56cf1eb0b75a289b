import os
import subprocess
import sys

from gpu_scheduler.engines import shared_board
from gpu_scheduler.engines.shared_board import SharedBoard
from gpu_scheduler.engines.sharing import decode_arbitration
from gpu_scheduler.engines.sharing.throttle import FREE, PrefillThrottle


def test_shared_board_written_by_one_process_is_read_by_another() -> None:
    fd = shared_board.create()
    SharedBoard(fd).set_throttle(7, PrefillThrottle(224))
    code = (
        "from gpu_scheduler.engines.shared_board import SharedBoard; "
        f"print(SharedBoard({fd}).throttle(7).chunk_tokens, SharedBoard({fd}).throttle(8).chunk_tokens)"
    )
    out = subprocess.run([sys.executable, "-c", code], pass_fds=[fd], capture_output=True, text=True, check=True)
    assert out.stdout.split() == ["224", "0"]
    os.close(fd)


def test_shared_board_when_new_has_no_throttle():
    assert SharedBoard(shared_board.create()).throttle(1) == FREE


def test_shared_board_has_a_throttle_for_each_engine_to_the_last_index():
    words = SharedBoard(shared_board.create())
    most = (1 << 32) - 1
    words.set_throttle(1, PrefillThrottle(224, 0.0125, 0.045, True))
    words.set_throttle(shared_board.MOST_INDEX, PrefillThrottle(1 << 40, 1e9, 1e9))  # as much as the words hold
    assert words.throttle(1) == PrefillThrottle(224, 0.0125, 0.045, True) and words.throttle(2) == FREE
    assert words.throttle(shared_board.MOST_INDEX) == PrefillThrottle(most, most / 1e6, most / 1e6)
    words.set_throttle(1, FREE)
    assert words.throttle(1) == FREE


def test_throttle_with_a_negative_target_is_read_as_one_without_a_target():
    words = SharedBoard(shared_board.create())
    words.set_throttle(1, PrefillThrottle(224, 0.0, -1.0))
    assert words.throttle(1) == PrefillThrottle(224, 0.0, 0.0)


def test_prefill_claim_holds_for_all_others_until_it_is_released_or_expires():
    words = SharedBoard(shared_board.create())
    words.set_prefill_priority(0.05, 0)
    words.claim(7, 100.0, 1)
    assert words.claimed(8, 100.04) and not words.claimed(7, 100.04)
    assert not words.claimed(8, 100.06), "its engine died"
    words.claim(7, 101.0, 1)
    words.claim(shared_board.MOST_INDEX, 101.0, 1)
    words.release(7)
    assert words.claimed(8, 101.0) and words.claimed(7, 101.0)
    words.release(shared_board.MOST_INDEX)
    assert not words.claimed(8, 101.0)


def test_prefill_claims_of_others_add_up_their_prompts():
    words = SharedBoard(shared_board.create())
    words.set_prefill_priority(0.05, 16)
    words.claim(7, 1e7, 3)
    words.claim(8, 1e7, 1 << 20)
    most = (1 << 16) - 1
    assert (words.claimed(7, 1e7), words.claimed(8, 1e7), words.claimed(9, 1e7)) == (most, 3, 3 + most)
    assert words.claimed(9, 1e7 + 0.06) == 0 and words.prefill_priority_batch == 16


def test_prefill_claim_without_prefill_priority_is_not_seen():
    words = SharedBoard(shared_board.create())
    words.claim(7, 100.0, 1)
    assert words.prefill_priority_s == 0 and not words.claimed(8, 100.0)


def test_decode_bid_is_seen_by_all_others_until_it_is_withdrawn_or_expires():
    words = SharedBoard(shared_board.create())
    words.bid(7, 0.25, 100.0)
    words.bid(shared_board.MOST_INDEX, 70.0, 100.0)
    assert sorted(words.bids(8, 100.04)) == [
        shared_board.bid_of(7, 0.25),
        shared_board.bid_of(shared_board.MOST_INDEX, 70.0),
    ]
    assert words.bids(7, 100.04) == [shared_board.bid_of(shared_board.MOST_INDEX, 70.0)]
    words.bid(7, None, 100.05)
    assert words.bids(8, 100.05) == [] == words.bids(7, 101.0), "one has ended, the other died"


def test_decode_bids_are_rounded_to_a_hundredth_and_compared_as_rounded():
    words = SharedBoard(shared_board.create())
    words.bid(1, 0.3349, 1e7, 3)
    assert words.bids(2, 1e7) == [shared_board.bid_of(1, 0.3301, 3)] != [shared_board.bid_of(1, 0.3301, 2)]
    assert shared_board.bid_of(1, 0.33, 3) == decode_arbitration.bid(0.33, 3, 1)
    words.bid(1, 9.0, 1e7, 1000)
    assert words.bids(2, 1e7) == [decode_arbitration.bid(2.55, 255, 1)], "as much as a word holds"


def test_decode_bids_leave_claims_throttles_and_settings_as_they_are():
    words = SharedBoard(shared_board.create())
    words.set_prefill_priority(0.02, 16)
    words.set_decode_arbitration(0.03)
    words.set_throttle(shared_board.MOST_INDEX, PrefillThrottle(224))
    words.claim(5, 100.0, 1)
    words.bid(5, 1e9, 100.0)
    words.bid(6, 0.0, 100.0)
    assert words.claimed(6, 100.01) and words.throttle(shared_board.MOST_INDEX) == PrefillThrottle(224)
    assert (words.prefill_priority_s, words.prefill_priority_batch, words.decode_arbitration_s) == (0.02, 16, 0.03)
    words.release(5)
    assert not words.claimed(6, 100.01) and words.bids(6, 100.01) == [shared_board.bid_of(5, 1e9)]


def test_prefill_priority_leaves_throttles_and_decode_arbitration_as_they_are():
    words = SharedBoard(shared_board.create())
    words.set_throttle(shared_board.MOST_INDEX, PrefillThrottle(224))
    words.set_prefill_priority(1e9, 1 << 40)  # as much as the words hold
    words.claim(shared_board.MOST_INDEX, 1e6, 1)
    assert words.throttle(shared_board.MOST_INDEX) == PrefillThrottle(224) and words.throttle(1) == FREE
    assert (words.prefill_priority_s, words.prefill_priority_batch) == (((1 << 32) - 1) / 1e6, (1 << 32) - 1)
    assert words.decode_arbitration_s == 0
