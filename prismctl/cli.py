"""What all commands have in common on the command line."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup


def _told(context: typer.Context, error: typer.TyperException) -> typer.TyperException:
    """Of an option that stands behind the command, and belongs before it: that."""
    option = getattr(error, "option_name", "")
    if option and option in {name for each in context.find_root().command.params for name in each.opts}:
        words = context.command_path.split()[len(context.find_root().command_path.split()) :]
        error.message = f"{option} stands before the command: prismctl {option} ... {' '.join(words)}"  # type: ignore[attr-defined]
    return error


class CliCommand(TyperCommand):
    """A command."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        try:
            return super().parse_args(ctx, args)
        except typer.TyperException as error:
            raise _told(ctx, error) from None


class CommandGroup(TyperGroup):
    """A command with commands below it."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        try:
            return super().parse_args(ctx, args)
        except typer.TyperException as error:
            raise _told(ctx, error) from None


def app(help: str | None = None) -> typer.Typer:
    """Plain lines, whatever the terminal: help and errors are read by scripts and logs too."""
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
