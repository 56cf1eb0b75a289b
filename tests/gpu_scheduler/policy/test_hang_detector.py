import pytest

from gpu_scheduler.policy.hang_detector import LOOK_S, SLOWER, HangDetector, HangVerdict

NOTHING, ASK, GIVE_UP = HangVerdict.NOTHING, HangVerdict.ASK, HangVerdict.GIVE_UP


def looks(detector, count, *, begin=0.0, works=True, heard=0, prefill_s=0.0):
    """What each of so many looks says, one after the other."""
    return [detector.look(begin + i * LOOK_S, works=works, heard=heard, prefill_s=prefill_s) for i in range(count)]


def test_silent_engine_is_asked_once_and_then_given_up():
    told = looks(HangDetector(9 * LOOK_S), 10)
    assert told == [NOTHING] * 3 + [ASK] + [NOTHING] * 5 + [GIVE_UP]


def test_silence_of_an_engine_counts_from_its_last_message_on():
    detector = HangDetector(9 * LOOK_S)
    looks(detector, 9)
    assert looks(detector, 10, begin=9 * LOOK_S, heard=1) == [NOTHING] * 3 + [ASK] + [NOTHING] * 5 + [GIVE_UP]


def test_idle_engine_may_be_silent_and_its_silence_counts_from_when_it_has_work():
    detector = HangDetector(3 * LOOK_S)
    assert set(looks(detector, 100, works=False)) == {NOTHING}
    assert looks(detector, 3, begin=100 * LOOK_S) == [ASK, NOTHING, GIVE_UP]


def test_silent_engine_is_not_given_up_before_it_was_asked():
    assert looks(HangDetector(LOOK_S / 100), 3) == [NOTHING, ASK, GIVE_UP]


def test_engine_with_a_prompt_under_way_has_several_times_as_long_as_it_should_take():
    told = looks(HangDetector(9 * LOOK_S), 10 + int(5 * SLOWER), prefill_s=5 * LOOK_S)
    assert told.index(GIVE_UP) == 9 + 5 * SLOWER


def test_time_in_which_the_scheduler_did_not_listen_is_no_silence():
    detector = HangDetector(9 * LOOK_S)
    looks(detector, 2)
    assert detector.look(1000.0, works=True, heard=0, prefill_s=0.0) is ASK
    assert detector.silent_s == 3 * LOOK_S
    # Nor does a clock that goes back count.
    detector.look(0.0, works=True, heard=0, prefill_s=0.0)
    assert detector.silent_s == 3 * LOOK_S


@pytest.mark.parametrize("prefill_s", [0.0, 1.0])
def test_silent_engine_is_never_given_up_where_no_time_is_set(prefill_s):
    assert set(looks(HangDetector(0.0), 1000, prefill_s=prefill_s)) == {NOTHING}
