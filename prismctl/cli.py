"""The part of the command line that all commands have in common."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup


def _told(context: typer.Context, error: typer.TyperException) -> typer.TyperException:
    """The error; for an option that stands behind the command, although it belongs before it, the message says that."""
    option = getattr(error, "option_name", "")
    if option and option in {name for each in context.find_root().command.params for name in each.opts}:
        words = context.command_path.split()[len(context.find_root().command_path.split()) :]
        error.message = f"{option} stands before the command: prismctl {option} ... {' '.join(words)}"  # type: ignore[attr-defined]
    return error


class CliCommand(TyperCommand):
    """A command whose errors explain misplaced options."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        try:
            return super().parse_args(ctx, args)
        except typer.TyperException as error:
            raise _told(ctx, error) from None


class CommandGroup(TyperGroup):
    """A group of commands whose errors explain misplaced options."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        try:
            return super().parse_args(ctx, args)
        except typer.TyperException as error:
            raise _told(ctx, error) from None


def app(help: str | None = None) -> typer.Typer:
    """An app with plain lines, whatever the terminal: scripts and logs read help and errors too."""
    return typer.Typer(
        no_args_is_help=True,
        add_completion=False,
        rich_markup_mode=None,
        pretty_exceptions_enable=False,
        cls=CommandGroup,
        help=help,
    )


def command(
    on: typer.Typer, example: str, name: str | None = None
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Adds a command, with an example at the end of its help."""
    return on.command(name, cls=CliCommand, epilog=f"Example: {example}")
