"""`python -m tokenization.trial`: tries whether what a gateway and an engine need of a folder beside its weights can be
used: its tokenizer, its chat template, its config.json as transformers reads it.

It is a process of its own, which its parent may end: libraries in C++ and Rust may do anything with broken files, and
what was loaded is some hundred MiB. It reads a folder's path as JSON from each line of its input, and answers with a
line of JSON: why the folder cannot be used, empty when it can, and whether that may pass while the files stay as they
are.
"""

from __future__ import annotations

import json
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from services.errors import Unmet
from tokenization import chat, files, loading

TEMPLATE_S = 3.0
"""Seconds of the processor in which a chat template has to make the plainest prompts, which takes milliseconds."""


class _Endless(BaseException):
    """The time for a template is over. No handler of exceptions in a template engine catches it."""


@contextmanager
def _seconds_of_the_processor() -> Iterator[None]:
    """Raises _Endless inside the block after `TEMPLATE_S`."""

    def over(_number: int, _frame: object) -> None:
        raise _Endless

    before = signal.signal(signal.SIGVTALRM, over)
    signal.setitimer(signal.ITIMER_VIRTUAL, TEMPLATE_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)


def verdict(path: str) -> tuple[str, bool]:
    """(why the folder cannot be used, in one line without its path, or empty; whether that may pass)"""
    try:
        loading.check_config(path)
        loading.load(path)
    except Unmet as error:
        return str(error), isinstance(error, files.UnreadableNow)
    except _Endless:
        return f"its chat template takes longer than {TEMPLATE_S:.0f} s for a message of a user", False
    return "", False


def main() -> None:
    loading.without_torch()
    chat.bounded = _seconds_of_the_processor
    print(json.dumps("ready"), flush=True)
    for line in sys.stdin:
        print(json.dumps(verdict(json.loads(line))), flush=True)


if __name__ == "__main__":
    main()
