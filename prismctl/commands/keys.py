"""`prismctl keys new`: makes a key for the gateway's file of keys. It calls no service and keeps nothing."""

from __future__ import annotations

import json
from typing import Annotated

import pydantic
import typer

from gateway.access.keys import Key, digest, new
from prismctl import cli
from prismctl.system.system import USAGE, failed
from prismctl.views.terminal import Json, show_json
from services.runtime.config import faults

app = cli.app("Keys of the gateway's API.")


@app.callback()
def _keys() -> None:
    """So that there is a command below `keys` though it is the only one."""


@cli.command(app, "prismctl keys new ann --models 'org/*' --requests-per-minute 60", "new")
def make(
    name: Annotated[str, typer.Argument(metavar="NAME", help="Owner of the key, named in logs and errors.")],
    models: Annotated[
        list[str] | None,
        typer.Option(help="Models that the key may ask for: a name, pattern or alias; may be repeated."),
    ] = None,
    requests_per_minute: Annotated[int | None, typer.Option(min=1)] = None,
    tokens_per_minute: Annotated[
        int | None, typer.Option(min=1, help="Tokens of prompts and answers together.")
    ] = None,
    in_flight: Annotated[
        int | None, typer.Option(min=1, help="Most answers of the key at the same time, at each gateway.")
    ] = None,
    admin: Annotated[bool, typer.Option(help="Let the key read /metrics and /ui too, and steer models.")] = False,
    json_: Json = False,
) -> None:
    """Make a key and print it, once: what is printed beside it, for the gateway's keys_file, has only its hash."""
    secret = new()
    try:
        key = Key(
            name=name,
            hash=digest(secret),
            models=tuple(models or ("*",)),
            requests_per_minute=requests_per_minute,
            tokens_per_minute=tokens_per_minute,
            in_flight=in_flight,
            admin=admin,
        )
    except pydantic.ValidationError as error:
        raise failed("; ".join(f"{fault.key}: {fault.what}" for fault in faults(error)), USAGE) from None
    entry = _entry(key)
    if json_:
        show_json({"key": secret, "entry": entry})
        return
    typer.echo(f"# The key, shown this once:\n# {secret}\n# For the gateway's keys_file:\n{entry}", nl=False)


def _entry(key: Key) -> str:
    """The key's entry as TOML, whose strings, numbers and lists are here those of JSON."""
    values = key.model_dump(exclude_defaults=True) | {"models": key.models}
    return "[[key]]\n" + "".join(f"{field} = {json.dumps(value)}\n" for field, value in values.items())
