"""`python -m gpu_scheduler.engines.sglang.grammar.sandbox` tries grammars, to see whether they can be compiled. It is
started by a gpu_scheduler (`gpu_scheduler/queue/grammar_sandbox.py`), never by hand.

xgrammar is C++ that trusts its input: some grammars take minutes to compile or all memory, others ended the process in
versions before this one, and no check of the text finds them all. An engine would end with every request of its model.
So each grammar is first compiled and followed for some tokens in a child process, for a small vocabulary of our own,
which takes milliseconds: what can go wrong lies in the grammar's states, seldom in the tokens.

The process reads lines of JSON, [kind, text], each text checked before (`policy/slow_grammars.py`), and answers each
with a line of JSON: the reason, in a client's words, why it cannot be compiled, or an empty text, or null if the trial
says nothing of the grammar. An empty line comes first, when all is imported.
"""

from __future__ import annotations

import json
import os
import random
import resource
import signal
import string
import sys

from gpu_scheduler.engines.sglang.base import environment
from gpu_scheduler.engines.sglang.grammar import compiling

MOST_CPU_S = 5
"""CPU seconds that a child may take; a grammar of 300 properties with patterns takes one."""
MOST_BYTES = 1 << 30
"""Bytes of data that a child may allocate."""
_STEPS = 32
"""Tokens for which a grammar is followed."""
_MOST_CHARACTERS = 1000
_NUL = 0


def vocabulary() -> list[bytes]:
    """The vocabulary: all bytes, and pairs of characters that are frequent in grammars."""
    often = (string.ascii_lowercase[:12] + string.digits[:4] + ' "{}[]:,-_').encode()
    return [bytes([byte]) for byte in range(256)] + [bytes([one, other]) for one in often for other in often]


class GrammarTrials:
    """Trials of grammars, each in a child process of its own."""

    def __init__(self) -> None:
        from xgrammar import TokenizerInfo, VocabType

        known = vocabulary()
        self._vocab_size = len(known)
        self._compiler = compiling.compiler(TokenizerInfo(known, VocabType.RAW, stop_token_ids=[_NUL]))

    def verdict(self, kind: str, text: str) -> str | None:
        """Reason why a grammar cannot be compiled; empty: it can; None: the child was killed by somebody else, as by a
        kernel that is short of memory. `kind` is that of `permitted_grammars`."""
        reads, writes = os.pipe()
        child = os.fork()
        if child == 0:
            self._end(writes, kind, text)
        os.close(writes)
        with open(reads, encoding="utf-8", errors="replace") as said:
            why = said.read()
        _, ended, used = os.wait4(child, 0)
        status = os.waitstatus_to_exitcode(ended)
        if status == 0:
            return why
        if -status in (signal.SIGXCPU, signal.SIGKILL):
            of_its_own = used.ru_utime + used.ru_stime >= MOST_CPU_S
            return f"compiling it takes more than {MOST_CPU_S} s" if of_its_own else None
        return "the compiler fails at it"

    def _end(self, writes: int, kind: str, text: str) -> None:
        """The child: tries the grammar, writes the reason to the pipe `writes`, and ends."""
        status = 1
        try:
            environment.die_with_parent()
            _limit()
            try:
                self._follow(kind, text)
            except compiling.Uncompilable as error:
                os.write(writes, str(error)[:_MOST_CHARACTERS].encode())
            status = 0
        except MemoryError:
            os.write(writes, b"compiling it takes too much memory")
            status = 0
        finally:
            os._exit(status)

    def _follow(self, kind: str, text: str) -> None:
        """Compiles the grammar and follows it for some random tokens. Raises Uncompilable."""
        from xgrammar import allocate_token_bitmask

        _, matcher = compiling.matcher(self._compiler, self._vocab_size, kind, text)
        mask, draw = allocate_token_bitmask(1, self._vocab_size), random.Random(0)
        for _ in range(_STEPS):
            mask.fill_(-1)  # as it stays where every token is allowed
            matcher.fill_next_token_bitmask(mask)
            words = mask[0].tolist()
            tokens = [token for token in range(self._vocab_size) if words[token >> 5] >> (token & 31) & 1]
            if not tokens or not matcher.accept_token(draw.choice(tokens)) or matcher.is_terminated():
                break


def _limit() -> None:
    """Limits this process's CPU time and data."""
    # A child that fails leaves no stack trace and no core.
    signal.signal(signal.SIGSEGV, signal.SIG_DFL)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    used = sum(resource.getrusage(resource.RUSAGE_SELF)[:2])
    seconds = int(used) + 1 + MOST_CPU_S
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds + 1))
    own = next(int(line.split()[1]) << 10 for line in open("/proc/self/status") if line.startswith("VmData:"))
    resource.setrlimit(resource.RLIMIT_DATA, (own + MOST_BYTES, own + MOST_BYTES))


def main() -> None:
    """Answers lines of standard input until it ends."""
    environment.die_with_parent()
    trial = GrammarTrials()
    print(flush=True)
    for line in sys.stdin:
        kind, text = json.loads(line)
        print(json.dumps(trial.verdict(kind, text)), flush=True)


if __name__ == "__main__":
    main()
