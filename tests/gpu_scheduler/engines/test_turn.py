import os
import subprocess
import sys

from gpu_scheduler.engines import turn
from gpu_scheduler.engines.turn import Turn
from gpu_scheduler.policy.pace import FREE, Pace


def test_a_fresh_word_lets_anybody_prefill():
    word = Turn(turn.create())
    assert word.mine(1) and word.mine(2)


def test_only_the_holder_may_prefill():
    word = Turn(turn.create())
    word.give(2)
    assert (word.mine(1), word.mine(2)) == (False, True)
    word.give(turn.ANYBODY)
    assert word.mine(1)


def test_another_process_sees_the_holder():
    fd = turn.create()
    Turn(fd).give(7)
    code = f"from gpu_scheduler.engines.turn import Turn; print(Turn({fd}).holder)"
    out = subprocess.run([sys.executable, "-c", code], pass_fds=[fd], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "7"
    os.close(fd)


def test_fresh_words_set_no_pace():
    assert Turn(turn.create()).pace(1) == FREE


def test_each_engine_has_its_own_pace_to_the_last_index():
    words = Turn(turn.create())
    most = (1 << 32) - 1
    words.give(2)
    words.set_pace(1, Pace(224, 0.0125, 0.045, 0.09))
    words.set_pace(turn.MOST_INDEX, Pace(1 << 40, 1e9, 1e9, 1e9))  # as much as the words hold
    assert words.pace(1) == Pace(224, 0.0125, 0.045, 0.09) and words.pace(2) == FREE and words.holder == 2
    assert words.pace(turn.MOST_INDEX) == Pace(most, most / 1e6, most / 1e6, most / 1e6)
    words.set_pace(1, FREE)
    assert words.pace(1) == FREE


def test_a_pace_below_zero_is_none_at_all():
    words = Turn(turn.create())
    words.set_pace(1, Pace(224, 0.0, -1.0, -2.0))
    assert words.pace(1) == Pace(224, 0.0, 0.0, 0.0)
