"""`prismctl`: see `prismctl --help` and docs/operate/prismctl.md."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer

from deploy import places
from prismctl import cli
from prismctl.commands import config, keys, models, steer
from prismctl.commands.check import check
from prismctl.commands.drain import drain
from prismctl.commands.explain import explain
from prismctl.commands.logs import logs
from prismctl.commands.plan import plan
from prismctl.commands.top import status, top
from prismctl.commands.trace import trace
from prismctl.system.system import USAGE, SystemAddresses, failed
from services.errors import PrismError
from services.rpc import rpc, tls
from services.telemetry import log
from services.wording import addresses

app = cli.app()
_STATE = Path(".run") if places.IS_CHECKOUT else places.state()
"""Folder of the sockets of what `make serve`, in the current folder, or `prism serve` has started."""
_COMMANDS: dict[Callable[..., None], str] = {
    status: "prismctl --state /run/prism status",
    top: "prismctl top --every 0.5",
    explain: "prismctl explain llama-debian --last 3",
    drain: "prismctl drain cuda:0",
    logs: "prismctl logs gateway placement --level warning --follow",
    trace: "prismctl trace requests.csv.gz",
    plan: "prismctl plan --catalogue models.toml --rates rates.csv --gpus 8 --fewest",
}
for command, example in _COMMANDS.items():
    cli.command(app, example)(command)
_ON_MODELS: dict[Callable[..., None], str] = {
    check: "prismctl models check /models/my-model",
    steer.wake: "prismctl models wake llama-debian --patience 60",
    steer.sleep: "prismctl models sleep llama-debian --to cold",
    steer.move: "prismctl models move llama-debian cuda:1",
    steer.replicate: "prismctl models replicate llama-debian cuda:1",
    steer.limit: "prismctl models limit llama-debian 2GiB",
}
for command, example in _ON_MODELS.items():
    cli.command(models.app, example)(command)
app.add_typer(models.app, name="models")
app.add_typer(config.app, name="config")
app.add_typer(keys.app, name="keys")


def _version(asked: bool) -> None:
    if asked:
        typer.echo(importlib.metadata.version("prism-serve"))
        raise typer.Exit


def _check_address(option: str, address: str) -> None:
    """Checks an address. Raises BadParameter: gRPC itself would take any text in its own way."""
    try:
        if address:
            addresses.grpc(address)
    except ValueError as error:
        raise typer.BadParameter(f"{option}: {error}") from None


@app.callback()
def main_options(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", help="Print the version.", callback=_version, is_eager=True)
    ] = False,
    state: Annotated[
        Path, typer.Option(help="Folder of a node's sockets; /run/prism where it is deployed.", envvar="PRISM_STATE")
    ] = _STATE,
    placement: Annotated[
        str, typer.Option(help="Placement's gRPC address, HOST:PORT or unix:PATH.", envvar="PRISM_PLACEMENT")
    ] = "",
    loader: Annotated[str, typer.Option(help="The loader's gRPC address.", envvar="PRISM_LOADER")] = "",
    balloond: Annotated[str, typer.Option(help="balloond's gRPC address.", envvar="PRISM_BALLOOND")] = "",
    gateway: Annotated[
        str, typer.Option(help="A gateway's gRPC address, not that of HTTP.", envvar="PRISM_GATEWAY")
    ] = "",
    wait: Annotated[float, typer.Option(min=0.0, help="Seconds to wait for a service that does not answer.")] = 2.0,
) -> None:
    """Look at a Prism system and steer it. Options of this level stand before the command. Status: 0 done, 1 no, 2 the
    command line or a file, 3 a service does not answer, 4 another change is under way, 130 interrupted."""
    for option, address in (
        ("--placement", placement),
        ("--loader", loader),
        ("--balloond", balloond),
        ("--gateway", gateway),
    ):
        _check_address(option, address)
    try:
        rpc.identify(tls.from_environment())
    except PrismError as error:
        raise failed(str(error), USAGE) from None
    context.obj = SystemAddresses(state, placement, loader, balloond, gateway, wait)


def main() -> None:
    log.configure("prismctl", "error")
    app()


if __name__ == "__main__":
    main()
