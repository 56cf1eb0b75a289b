"""The command line itself: what every command has."""

import re
import shlex

import pytest
import typer
from typer.testing import CliRunner

from prismctl.__main__ import app


def commands():
    """Words and command, of each that does something."""

    def walk(words, command):
        below = getattr(command, "commands", None)
        if below is None:
            yield words, command
        for name, one in (below or {}).items():
            yield from walk((*words, name), one)

    return dict(walk((), typer.main.get_command(app)))


COMMANDS = commands()


def run(*arguments, env=None):
    return CliRunner(env=env).invoke(app, list(arguments))


@pytest.mark.parametrize("words", COMMANDS, ids=" ".join)
def test_help_of_every_command_has_an_example_that_parses(words):
    text = run(*words, "--help", env={"COLUMNS": "200"}).output
    program, *given = shlex.split(re.search(r"Example: (.*)", text)[1])
    if given[0] == "--state":  # of the level above
        del given[:2]
    assert program == "prismctl" and tuple(given[: len(words)]) == words
    with COMMANDS[words].make_context("example", given[len(words) :]):
        pass


@pytest.mark.parametrize("words", [words for words in COMMANDS if words != ("plan",)], ids=" ".join)
def test_global_option_after_a_command_is_refused_with_its_right_place(words):
    result = run(*words, "--state", "/run/prism")
    assert result.exit_code == 2
    assert f"--state stands before the command: prismctl --state ... {' '.join(words)}" in result.output


def test_global_option_between_two_command_words_is_refused_with_its_right_place():
    assert "--wait stands before the command: prismctl --wait ... models" in run("models", "--wait", "3", "list").output


@pytest.mark.parametrize("option", ["--placement", "--loader", "--balloond", "--gateway"])
def test_malformed_address_is_refused_before_any_service_is_called(option):
    result = run(option, "here", "status")
    assert result.exit_code == 2 and f'{option}: "here" is neither "unix:PATH" nor "HOST:PORT"' in result.output
