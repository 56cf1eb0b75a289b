"""Folders are tried once, one after the other, in a process that ends with the work and may die of it."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

from loader.checkpoints import text_trials
from loader.checkpoints.text_trials import TextFault, TextTrials
from tests.gateway import tokenizers
from tests.tokenization import folders

CHILD = """
import json, os, sys
print(json.dumps("ready"), flush=True)
tried = set()
for line in sys.stdin:
    path = json.loads(line)
    with open(sys.argv[1], "a") as seen:
        seen.write(f"{os.getpid()} {path}\\n")
    if path == "dies":
        os._exit(1)
    why = {"good": "", "away": "its folder is not there"}.get(path, "it is broken")
    if path in tried:
        why = {"bad once": "", "bad otherwise": "it is broken in another way"}.get(path, why)
    tried.add(path)
    print(json.dumps([why, path == "away"]), flush=True)
"""


def trials(log: Path) -> TextTrials:
    return TextTrials((sys.executable, "-c", CHILD, str(log)))


async def test_tokenizer_trial_of_a_folder_happens_once_for_each_state_of_its_files(tmp_path: Path) -> None:
    tried = trials(tmp_path / "log")
    assert await asyncio.gather(*(tried.fault("good", 1, lambda: 1) for _ in range(3))) == [None] * 3
    assert await tried.fault("bad", 1, lambda: 1) == TextFault("it is broken")
    assert await tried.fault("good", 2, lambda: 2) is None
    lines = (tmp_path / "log").read_text().split()
    assert lines[1::2] == ["good", "bad", "bad", "good"]


async def test_known_verdict_on_a_folder_waits_for_no_trial_of_another(tmp_path: Path) -> None:
    tried = trials(tmp_path / "log")
    assert await tried.fault("good", 1, lambda: 1) is None
    async with tried._turn:  # as while another folder is tried
        assert await tried.fault("good", 1, lambda: 1) is None


async def test_tokenizer_trial_with_a_passing_fault_is_repeated(tmp_path: Path) -> None:
    tried = trials(tmp_path / "log")
    for _ in range(2):
        assert await tried.fault("away", 1, lambda: 1) == TextFault("its folder is not there", may_pass=True)
    assert (tmp_path / "log").read_text().split()[1::2] == ["away", "away"]


async def test_fault_of_files_that_are_not_there_all_the_time_passes_and_is_not_remembered(tmp_path: Path) -> None:
    tried = trials(tmp_path / "log")
    assert await tried.fault("bad", 1, lambda: 0) == TextFault("it is broken", may_pass=True)
    assert await tried.fault("good", 1, lambda: 2) is None
    assert await tried.fault("bad", 1, lambda: 1) == TextFault("it is broken")
    assert await tried.fault("good", 1, lambda: 1) is None
    assert (tmp_path / "log").read_text().split()[1::2] == ["bad", "bad", "good", "bad", "bad", "good"]


async def test_fault_that_a_second_trial_does_not_find_is_none_or_passes(tmp_path: Path) -> None:
    tried = trials(tmp_path / "log")
    assert await tried.fault("bad once", 1, lambda: 1) is None
    assert await tried.fault("bad otherwise", 1, lambda: 1) == TextFault("it is broken", may_pass=True)
    assert (tmp_path / "log").read_text().splitlines()[-1].endswith("bad otherwise")


async def test_tokenizer_trials_waiting_together_share_a_process_that_ends_after_the_last(tmp_path: Path) -> None:
    tried = trials(tmp_path / "log")
    await asyncio.gather(*(tried.fault(path, 1, lambda: 1) for path in ("good", "bad", "other")))
    assert len(set((tmp_path / "log").read_text().split()[::2])) == 1
    assert tried._process is None


async def test_folder_at_which_the_trial_process_dies_is_at_fault_and_the_next_one_is_not(tmp_path: Path) -> None:
    tried = trials(tmp_path / "log")
    found = await asyncio.gather(tried.fault("dies", 1, lambda: 1), tried.fault("good", 1, lambda: 1))
    assert found == [TextFault("its tokenizer ends the process that reads it", may_pass=True), None]


async def test_folder_whose_trial_takes_too_long_is_at_fault(tmp_path: Path, monkeypatch) -> None:  # type: ignore[no-untyped-def]
    monkeypatch.setattr(text_trials, "ANSWER_S", 0.01)
    waits = TextTrials((sys.executable, "-c", "print('1', flush=True)\nimport signal\nsignal.pause()"))
    found = await waits.fault("slow", 1, lambda: 1)
    assert found is not None and found.may_pass and "within" in found.why


async def test_trial_process_that_cannot_start_is_no_fault_of_the_folder_and_is_tried_again(tmp_path: Path) -> None:
    tried = TextTrials(("/nowhere/at/all",))
    assert await tried.fault("bad", 1, lambda: 1) is None
    tried._command = trials(tmp_path / "log")._command
    assert await tried.fault("bad", 1, lambda: 1) == TextFault("it is broken")


async def test_trial_process_accepts_a_good_folder_and_refuses_a_bad_one(tmp_path: Path) -> None:
    good = folders.write(tmp_path / "good", tokenizers.byte_level, {"tokenizer_class": "LlamaTokenizerFast"})
    bad = folders.write(tmp_path / "bad", tokenizers.byte_level, {}, template="{% if %}")
    tried = TextTrials()
    assert await asyncio.gather(tried.fault(str(good), 1, lambda: 1), tried.fault(str(bad), 1, lambda: 1)) == [
        None,
        TextFault(
            "its chat template does not compile: chat_template of tokenizer_config.json, line 1:"
            " Expected an expression, got 'end of statement block'"
        ),
    ]


async def test_trial_process_refuses_an_endless_chat_template_and_goes_on(tmp_path: Path) -> None:
    endless = "{% for i in range(100000) %}{% for j in range(100000) %}{% endfor %}{% endfor %}"
    bad = folders.write(tmp_path / "bad", tokenizers.byte_level, {}, template=endless)
    good = folders.write(tmp_path / "good", tokenizers.byte_level, {})
    tried = TextTrials()
    assert await asyncio.gather(tried.fault(str(bad), 1, lambda: 1), tried.fault(str(good), 1, lambda: 1)) == [
        TextFault("its chat template takes longer than 3 s for a message of a user"),
        None,
    ]


async def test_trial_process_does_not_prompt_for_running_code_of_a_folder(tmp_path: Path) -> None:
    """Transformers would, by the process's own input and output, which are for verdicts."""
    code = {"auto_map": {"AutoTokenizer": ["own.Tokenizer", None]}}
    own = folders.write(tmp_path / "own", tokenizers.byte_level, code)
    good = folders.write(tmp_path / "good", tokenizers.byte_level, {})
    tried = TextTrials()
    assert await asyncio.gather(tried.fault(str(own), 1, lambda: 1), tried.fault(str(good), 1, lambda: 1)) == [
        TextFault(
            "its tokenizer cannot be used: tokenizer_config.json names code of the folder's own (auto_map),"
            " which is not run"
        ),
        None,
    ]
