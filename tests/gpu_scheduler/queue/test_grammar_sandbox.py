"""Grammars tried by the real process that does so."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import uvloop

from gpu_scheduler.queue import grammar_sandbox
from gpu_scheduler.queue.grammar_sandbox import GrammarSandbox
from services.errors import Unavailable
from services.runtime import tasks
from tests.gpu_scheduler.engines.sglang.grammars import large

GOOD = ("json_schema", '{"type": "integer"}')


@pytest.fixture
async def tried() -> AsyncIterator[GrammarSandbox]:
    made = GrammarSandbox()
    yield made
    await made.close()


def pid(of: GrammarSandbox) -> int:
    assert of._process is not None
    return of._process.pid


@pytest.mark.sglang
async def test_grammar_that_is_wrong_is_refused_and_others_compiled(tried: GrammarSandbox) -> None:
    assert await tried.verdict(*GOOD) == ""
    process = pid(tried)
    for kind, text, why in [
        ("regex", "a{1,2147483648}", "Invalid repetition range"),
        ("json_schema", '{"type": "strin"}', 'Unsupported type "strin"'),
        ("json_schema", '{"$ref": "#"}', "it allows no answer"),
        ("ebnf", "root ::= nothing", 'Rule "nothing" is not defined'),
        ("ebnf", 'root ::= "<" ("one" | "two") ">" root?', ""),
        ("regex", r"[a-z]{3}-(0|1){4}", ""),
        ("json_schema", large(300), ""),
    ]:
        verdict = await tried.verdict(kind, text)
        assert why in verdict and bool(why) == bool(verdict), (text[:60], verdict)
        assert tried.known(kind, text) == verdict
    assert pid(tried) == process


CRASHES = """
import os, signal, sys
from gpu_scheduler.engines.sglang.grammar import compiling, sandbox
compiles = compiling.matcher
def crashes(compiler, vocab_size, kind, text):
    if text == "crash":
        os.kill(os.getpid(), signal.SIGSEGV)
    if text == "killed" and not os.path.exists(sys.argv[1]):
        open(sys.argv[1], "w").close()
        os.kill(os.getpid(), signal.SIGKILL)
    return compiles(compiler, vocab_size, kind, text)
compiling.matcher = crashes
sandbox.main()
"""


@pytest.mark.sglang
async def test_grammar_that_crashes_its_compiler_is_refused_and_the_next_one_compiled() -> None:
    """No grammar is known that crashes xgrammar itself; others before it had some."""
    tried = talking(CRASHES)
    assert await tried.verdict("regex", "crash") == "the compiler fails at it"
    process = pid(tried)
    assert await tried.verdict("regex", "a") == "" and pid(tried) == process
    await tried.close()


@pytest.mark.sglang
async def test_grammar_whose_trial_somebody_kills_is_tried_again_at_the_next_request(tmp_path: Path) -> None:
    tried = GrammarSandbox((sys.executable, "-c", CRASHES, str(tmp_path / "killed once")))
    with pytest.raises(Unavailable, match="ask again"):
        await tried.verdict("regex", "killed")
    process = pid(tried)
    assert tried.known("regex", "killed") is None
    assert await tried.verdict("regex", "killed") == "" and pid(tried) == process
    await tried.close()


@pytest.mark.sglang
async def test_grammar_sandbox_whose_process_died_starts_another_for_the_next_grammar(tried: GrammarSandbox) -> None:
    assert await tried.verdict(*GOOD) == ""
    os.kill(pid(tried), signal.SIGKILL)
    with pytest.raises(Unavailable, match="ask again"):
        await tried.verdict("regex", "a")
    assert tried.known("regex", "a") is None
    assert await tried.verdict(*GOOD) == ""  # it is known
    assert await tried.verdict("regex", "a") == ""


@pytest.mark.parametrize("run", [asyncio.run, uvloop.run])
def test_grammar_sandbox_whose_process_died_while_idle_tries_the_next_grammar(run: Any) -> None:
    """Services run on uvloop, where to write to a pipe that is known to be closed is another error."""

    async def ask_kill_and_ask() -> str:
        tried = talking(ECHO)
        assert await tried.verdict("regex", "a") == ""
        process = tried._process
        assert process is not None
        os.kill(process.pid, signal.SIGKILL)
        await process.ended()
        try:
            return await tried.verdict("regex", "bad")
        finally:
            await tried.close()

    assert run(ask_kill_and_ask()) == "it is bad"


def talking(program: str) -> GrammarSandbox:
    return GrammarSandbox((sys.executable, "-c", program))


ECHO = """
import json, sys
print(flush=True)
for line in sys.stdin:
    print(json.dumps("" if json.loads(line)[1] != "bad" else "it is bad"), flush=True)
"""


async def test_grammar_verdicts_are_remembered_up_to_a_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammar_sandbox, "KNOWN", 2)
    tried = talking(ECHO)
    assert await asyncio.gather(*(tried.verdict("regex", text) for text in ("a", "bad", "a"))) == ["", "it is bad", ""]
    assert await tried.verdict("regex", "c") == ""
    assert [tried.known("regex", text) for text in ("a", "bad", "c")] == ["", None, ""]
    assert tried.known("ebnf", "a") is None
    await tried.close()


async def test_cancelled_wait_for_a_grammar_verdict_leaves_other_verdicts_as_they_are() -> None:
    tried = talking(ECHO)
    first = tasks.spawn(tried.verdict("regex", "bad"), "first")
    second = tasks.spawn(tried.verdict("regex", "a"), "second")
    await asyncio.sleep(0)
    first.cancel()
    assert await second == ""
    assert tried.known("regex", "bad") == "it is bad"
    await tried.close()


@pytest.mark.parametrize("program", ["", "print('nothing here', flush=True)", "print(); input(); print('not JSON')"])
async def test_grammar_process_that_answers_nonsense_is_an_error_that_says_to_ask_again(program: str) -> None:
    tried = talking(program)
    for _ in range(2):
        with pytest.raises(Unavailable, match="ask again"):
            await tried.verdict(*GOOD)
    await tried.close()


async def test_grammar_process_that_stands_still_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammar_sandbox, "ANSWER_S", 0.01)
    tried = talking("print(flush=True)\nimport time\ntime.sleep(1000)")
    with pytest.raises(Unavailable, match="ask again"):
        await tried.verdict(*GOOD)
    assert tried._process is None
    await tried.close()


async def test_closed_grammar_sandbox_keeps_no_process() -> None:
    tried = talking(ECHO)
    assert await tried.verdict(*GOOD) == ""
    await tried.close()
    with pytest.raises(Unavailable, match="ask again"):
        await tried.verdict("regex", "a")
    assert tried._process is None
