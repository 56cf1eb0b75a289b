"""`prismctl logs`: the services' logs of a local system, as one."""

from __future__ import annotations

import contextlib
import heapq
import json
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from prismctl.system.system import USAGE, SystemAddresses, failed
from prismctl.views.terminal import Json

_LEVELS = ("debug", "info", "warning", "error", "critical")
_TAIL_BYTES = 8 << 20
"""The most bytes that are read of each file: its end."""
_LOOK_S = 0.2
_OWN = ("timestamp", "level", "event", "service")


@dataclass(frozen=True)
class LogEntry:
    """A line of a log. Lines that no service wrote itself (a traceback, output of a library) belong to the line
    before."""

    service: str
    at: str
    level: str
    text: str
    values: dict[str, Any]
    continues: bool = False
    """Whether the line goes on with the message of the line before it, and has a copy of that line's values."""

    def about(self, model: str) -> bool:
        return self.values.get("model") == model


def entries(service: str, lines: Iterable[str]) -> Iterator[LogEntry]:
    """The entries of one file, in its order."""
    at, level, values = "", "", dict[str, Any]()
    for line in lines:
        try:
            known = json.loads(line)
            at, level, text = known["timestamp"], known["level"], known["event"]
        except (ValueError, KeyError, TypeError):
            if line.strip():
                yield LogEntry(service, at, level, line.rstrip(), values, continues=True)
            continue
        values = {key: value for key, value in known.items() if key not in _OWN}
        yield LogEntry(service, at, level, str(text), values)


class LogTail:
    """A file whose new whole lines are read call by call."""

    def __init__(self, path: Path, tail_bytes: int = _TAIL_BYTES) -> None:
        self._path = path
        self._offset = max(0, path.stat().st_size - tail_bytes)
        self._cut = self._offset > 0
        self._rest = b""

    def read(self) -> list[str]:
        """The lines that are new since the last call, possibly none. A file that began anew is read from its start."""
        try:
            file = open(self._path, "rb")
        except FileNotFoundError:  # the system is being started again, and moves its logs away
            return []
        with file:
            if file.seek(0, 2) < self._offset:
                self._offset, self._rest, self._cut = 0, b"", False
            file.seek(self._offset)
            told = self._rest + file.read()
            self._offset = file.tell()
        *lines, self._rest = told.split(b"\n")
        if self._cut and lines:
            self._cut = False
            del lines[0]  # reading began in the middle of this line
        return [line.decode(errors="replace") for line in lines]


def logs(
    context: typer.Context,
    services: Annotated[
        list[str] | None, typer.Argument(metavar="SERVICE...", help="Services to read; default: all.")
    ] = None,
    last: Annotated[int, typer.Option("--last", "-n", min=0, help="Number of last lines to print first.")] = 50,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Print new lines as they are logged.")] = False,
    model: Annotated[str, typer.Option(help="Print only lines about this model.")] = "",
    level: Annotated[str, typer.Option(help="Least level to print: " + ", ".join(_LEVELS))] = "debug",
    json_: Json = False,
) -> None:
    """What the services log, merged by time. Of a local system (`make serve`): under systemd it is in the journal
    (`journalctl -u 'prism-*'`), in containers their runtime has it. With --json an object a line."""
    system: SystemAddresses = context.obj
    if level not in _LEVELS:
        raise typer.BadParameter(f"--level is one of {', '.join(_LEVELS)}, not {level!r}")
    folder = system.state / "logs"
    try:
        all_, tails = _tails(folder, {}, None), _tails(folder, {}, services)
    except OSError as error:
        raise failed(f"{error.filename}: {error.strerror}", USAGE) from None
    if not all_:
        where = "--state FOLDER, or PRISM_STATE, says where a local system is; under systemd: journalctl -u 'prism-*'"
        raise failed(f"no logs in {folder.resolve()}; {where}", USAGE)
    unknown = sorted(set(services or ()) - tails.keys())
    if unknown:
        raise failed(f"no log of {', '.join(unknown)} in {folder}", USAGE)

    def wanted() -> Iterator[LogEntry]:
        for entry in _read(tails):
            if _LEVELS.index(level) <= _rank(entry.level) and (not model or entry.about(model)):
                yield entry

    found = list(wanted())
    _print(found[len(found) - last :] if last < len(found) else found, json_)
    if model and not found:
        least = "" if level == _LEVELS[0] else f" of level {level} or above"
        where = f"of {', '.join(tails)}" if services else f"of the logs in {folder.resolve()}"
        typer.echo(f"prismctl: no line{least} {where} names the model {model!r}", err=True)
    with contextlib.suppress(KeyboardInterrupt):  # how a user ends following
        while follow:
            time.sleep(_LOOK_S)
            tails = _tails(folder, tails, services)
            _print(wanted(), json_)


def _tails(folder: Path, known: dict[str, LogTail], services: list[str] | None) -> dict[str, LogTail]:
    """A LogTail for each service that has a log; `known` ones are kept, new ones are opened."""
    paths = {path.stem: path for path in sorted(folder.glob("*.log")) if not services or path.stem in services}
    return {name: known.get(name) or LogTail(path) for name, path in paths.items()}


def _read(tails: dict[str, LogTail]) -> Iterator[LogEntry]:
    return heapq.merge(*(entries(name, tail.read()) for name, tail in tails.items()), key=lambda entry: entry.at)


def _rank(level: str) -> int:
    return _LEVELS.index(level) if level in _LEVELS else _LEVELS.index("info")


def _print(found: Iterable[LogEntry], as_json: bool) -> None:
    for entry in found:
        if as_json:
            own = {"timestamp": entry.at, "service": entry.service, "level": entry.level, "event": entry.text}
            typer.echo(json.dumps(own | entry.values))
        else:
            values = "".join(f" {key}={value}" for key, value in entry.values.items() if not entry.continues)
            typer.echo(f"{entry.at[11:23]} {entry.service} {entry.level}: {entry.text}{values}")
