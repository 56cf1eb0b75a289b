import os
import subprocess
import sys

from gpu_scheduler.engines import turn
from gpu_scheduler.engines.turn import Turn


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
