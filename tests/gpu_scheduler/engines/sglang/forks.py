"""A process that has imported SGLang, as an engine does, and runs each script in a fork of its own: importing it takes
far longer than any of them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Iterator
from contextlib import contextmanager


class Imported:
    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    def run(self, script: str) -> None:
        """Asserts that the script ends without an exception."""
        assert self._process.stdin is not None and self._process.stdout is not None
        print(json.dumps(script), file=self._process.stdin, flush=True)
        status, said = json.loads(self._process.stdout.readline())
        assert status == 0, said


@contextmanager
def imported() -> Iterator[Imported]:
    command = [sys.executable, "-m", __name__]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield Imported(process)
        finally:
            process.kill()


def _run(script: str) -> tuple[int, str]:
    """(exit status, what it said) of the script in a fork."""
    with tempfile.TemporaryFile("w+") as said:
        if not (pid := os.fork()):
            status = 1
            try:
                os.dup2(said.fileno(), 1)
                os.dup2(said.fileno(), 2)
                exec(script, {"__name__": "__main__"})
                status = 0
            except BaseException:
                traceback.print_exc()
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(status)
        _, status = os.waitpid(pid, 0)
        said.seek(0)
        return os.waitstatus_to_exitcode(status), said.read()


def _main() -> None:
    from gpu_scheduler.engines.sglang.base import environment

    environment.prepare()
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what SGLang prints is no answer
    from gpu_scheduler.engines.sglang import engine  # noqa: F401

    for line in sys.stdin:
        print(json.dumps(_run(json.loads(line))), file=answers, flush=True)


if __name__ == "__main__":
    _main()
