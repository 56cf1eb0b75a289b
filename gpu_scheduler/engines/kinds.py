"""The kinds of engines: how each is started, and what the gpu_scheduler has to know of it. Nothing of an engine is
imported before it is used."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from gpu_scheduler.engines import echo


@dataclass(frozen=True)
class EngineKind:
    """One kind of engine."""

    module: str
    """Module that `python -m` starts as the engine's process."""
    first_step: str
    """What its process does before it is warm, for people who wait for that."""
    several_devices: bool
    """Whether one engine can be spread over the devices of a group."""
    grammar_sandbox: str = ""
    """Module that `python -m` starts to try grammars where they can do no harm; empty: engines of this kind compile
    none."""


KINDS = {
    "sglang": EngineKind(
        "gpu_scheduler.engines.sglang",
        "importing SGLang",
        several_devices=True,
        grammar_sandbox="gpu_scheduler.engines.sglang.grammar.sandbox",
    ),
    "echo": EngineKind("gpu_scheduler.engines.echo", "starting", several_devices=False),
}


def check_options(options: Mapping[str, str]) -> None:
    """Checks options that a group hands to all of its engines, each of which looks at its own. Raises ValueError, in
    one line, for an option that no kind of engine has, or a value that SGLang's engine would refuse of any model."""
    from gpu_scheduler.engines.sglang.base.errors import CommandError
    from gpu_scheduler.engines.sglang.base.options import Options

    try:
        Options.parse({name: value for name, value in options.items() if name not in echo.OPTIONS}, "cpu:0")
    except CommandError as error:
        raise ValueError(str(error)) from None


def of_group(devices: Collection[str]) -> list[str]:
    """The kinds of engines that a group of these devices can have."""
    return [name for name, kind in KINDS.items() if kind.several_devices or len(devices) == 1]
