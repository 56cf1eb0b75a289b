"""Configuration: one TOML file a service, checked by a schema. With an unknown key or an impossible value a service
does not start, and says why in one line.

`${NAME}` in a string is the environment's NAME when a service reads its file: for what differs between nodes that have
the same file. A string that is nothing else may stand for a number, or for true and false.
"""

from __future__ import annotations

import contextlib
import difflib
import functools
import os
import re
import sys
import tomllib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, NamedTuple, TypeVar, get_args

import pydantic

from services.wording.addresses import Address, HttpAddressOrNone
from services.wording.plurals import counted


class ConfigSection(pydantic.BaseModel):
    """A part of a configuration: immutable; unknown keys are errors, and so are values of another type ("yes" for true,
    "5" for 5), except whole numbers for others."""

    model_config = pydantic.ConfigDict(frozen=True, extra="forbid", strict=True)

    REMOVED: ClassVar[Mapping[str, str]] = {}
    """Names that were settings until the last minor version -> what holds in their place. A file that has them can be
    used; they have no effect, and a warning says so. `table.name`: a name in a table that takes names of any kind."""


_T = TypeVar("_T")
Listed = Annotated[tuple[_T, ...], pydantic.Strict(False)]
"""A list of TOML as an immutable field. Its entries are checked as all values are."""


class ServerTls(ConfigSection):
    """What a server shows of itself. The files may change while it runs (`services/rpc/tls.py`)."""

    certificate: str
    """PEM: the server's own first, then those in between."""
    key: str
    """PEM, of the certificate; without a passphrase."""


class NodeTls(ServerTls):
    """What a process shows to the others of the system, as a server and as a client, and whom it takes for one of
    them: who has a certificate of `ca`."""

    ca: str
    """PEM, of one or more."""
    server_name: str = ""
    """The name that all servers' certificates have; empty: each has its address's host."""


class Config(ConfigSection):
    """What every service has."""

    name: str
    """How the process calls itself in logs and metrics."""
    listen: Address
    """gRPC address: "unix:/run/prism/balloond.sock" or "host:port"."""
    metrics: HttpAddressOrNone = ""
    """Prometheus text over HTTP, "host:port"; empty: off."""
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    """The least that is logged."""
    log_format: Literal["auto", "json", "text"] = "auto"
    """"auto": text on a terminal, JSON lines otherwise."""
    socket_mode: Literal["0600", "0660", "0666"] = "0600"
    """Who may connect to `listen` where that is a Unix socket, and to the stream beside it, whatever the umask: the
    kernel asks for the right to write. "0660": also the group; root always."""
    tls: NodeTls | None = None
    """For gRPC with other processes over TCP; none: in the clear. Unix sockets need none."""
    drain_s: float = pydantic.Field(default=10.0, ge=0, le=86_400)
    """How long a stop waits for what is under way."""

    @property
    def serving_tls(self) -> ServerTls | None:
        """Certificate that is shown to clients of `listen`; None: connections are in the clear."""
        return self.tls


C = TypeVar("C", bound=pydantic.BaseModel)
_VARIABLE = re.compile(r"\$\{([A-Z_][A-Z0-9_]*)\}")


def parse(
    kind: type[C],
    text: str,
    source: str,
    environment: Mapping[str, str] | None = None,
    warn: Callable[[str], object] = lambda line: None,
) -> C:
    """Checks `text` (TOML) against `kind`. With `environment` its variables are filled in, without it they stay as they
    are. `warn` gets a line for each setting that has no effect any more. Raises ValueError with one line that names
    `source`, the key and the problem."""
    try:
        values = tomllib.loads(text)
        if environment is not None:
            values = filled(values, environment)
    except tomllib.TOMLDecodeError as error:
        raise ValueError(f"{source}: not TOML: {error}") from None
    except RecursionError:
        raise ValueError(f"{source}: nested too deeply") from None
    except KeyError as error:
        raise ValueError(f"{source}: {error.args[0]} is not set in the environment") from None
    values, removed = without_removed(kind, values)
    for fault in removed:
        warn(f"{source}: {fault.key}: {fault.what}")
    try:
        try:
            return kind.model_validate(values)
        except pydantic.ValidationError as error:
            if not _give_types(values, error):
                raise
            return kind.model_validate(values)
    except pydantic.ValidationError as error:
        found = "; ".join(f"{fault.key}: {fault.what}" for fault in faults(error, kind))
        raise ValueError(f"{source}: {found}") from None


class _Text(str):
    """The value of a variable that is all of a string."""


def _give_types(values: Any, error: pydantic.ValidationError) -> bool:
    """Makes numbers and booleans of the variables of `values` that should be some: the environment has texts alone.
    Returns whether there were any."""
    found = False
    for problem in error.errors():
        if not isinstance(problem["input"], _Text) or problem["type"] not in ("int_type", "float_type", "bool_type"):
            continue
        *way, last = problem["loc"]
        with contextlib.suppress(tomllib.TOMLDecodeError, LookupError, TypeError):
            table = functools.reduce(lambda table, key: table[key], way, values)
            table[last] = tomllib.loads(f"value = {problem['input']}")["value"]
            found = True
    return found


def filled(value: Any, environment: Mapping[str, str]) -> Any:
    """The value with variables filled in. Raises KeyError with the name of a variable that is not set."""
    if isinstance(value, str):
        if alone := _VARIABLE.fullmatch(value):
            return _Text(environment[alone[1]])
        return _VARIABLE.sub(lambda found: environment[found[1]], value)
    if isinstance(value, list):
        return [filled(each, environment) for each in value]
    if isinstance(value, dict):
        return {key: filled(each, environment) for key, each in value.items()}
    return value


class Fault(NamedTuple):
    """What is wrong with a configuration, and where: keys, and numbers in arrays, from the outermost on."""

    at: tuple[str | int, ...]
    what: str

    @property
    def key(self) -> str:
        return ".".join(str(part) for part in self.at) or "(file)"


class FaultWithin(ValueError):
    """Raised by a validator: what is wrong with a part of the value, and the way from the value to the part."""

    def __init__(self, at: tuple[str | int, ...], what: str) -> None:
        super().__init__(what)
        self.at = at


def faults(error: pydantic.ValidationError, kind: type[pydantic.BaseModel] | None = None) -> list[Fault]:
    """All faults of a failed validation. With the class that was validated, those of unknown keys name the nearest
    known one."""
    return [
        Fault(
            problem["loc"] + getattr(problem.get("ctx", {}).get("error"), "at", ()),
            _unknown(kind, problem["loc"])
            if problem["type"] == "extra_forbidden"
            else _what(problem["type"], problem.get("ctx", {}), problem["msg"]),
        )
        for problem in error.errors()
    ]


_BOUNDS = {
    "greater_than": "greater than {gt}",
    "greater_than_equal": "at least {ge}",
    "less_than": "less than {lt}",
    "less_than_equal": "at most {le}",
    "multiple_of": "a multiple of {multiple_of}",
    "literal_error": "{expected}",
}
"""Kind of fault of the library -> what a value should be, with the names of the fault's context."""
_TYPES = {
    "model": "a table",
    "dict": "a table",
    "dataclass": "a table",
    "list": "a list",
    "tuple": "a list",
    "bool": "true or false",
    "int": "a whole number",
    "float": "a number",
    "string": "a text",
}
"""Type, as the library's kinds of faults begin -> its name in TOML."""


def _what(kind: str, context: Mapping[str, Any], message: str) -> str:
    """What is wrong, in words of TOML where the library's are those of Python."""
    if kind == "missing":
        return "it is required, and is not there"
    if kind in ("too_short", "string_too_short"):
        what = ("entry", "entries") if kind == "too_short" else ("character", "characters")
        return f"it should have at least {counted(context['min_length'], *what)}"
    if kind in _BOUNDS:
        return f"it should be {_BOUNDS[kind].format_map(context)}"
    if kind == "finite_number":
        return "it should be a finite number"
    about, _, rest = kind.partition("_")
    if about in _TYPES and rest in ("type", "attributes_type", "parsing", "from_float"):
        return f"it should be {_TYPES[about]}"
    return message.removeprefix("Value error, ").replace("Input should", "it should", 1)


def _unknown(kind: type[pydantic.BaseModel] | None, at: tuple[str | int, ...]) -> str:
    """What is said of the unknown key at this place: it names the nearest known one, if any is near."""
    for step in at[:-1]:
        if isinstance(step, str) and kind is not None:
            kind = section(kind.model_fields[step].annotation) if step in kind.model_fields else None
    near = difflib.get_close_matches(str(at[-1]), kind.model_fields if kind is not None else (), 1)
    return f"unknown key; the nearest one is {near[0]}" if near else "unknown key"


def section(annotation: Any) -> type[pydantic.BaseModel] | None:
    """The class that checks the tables of a field; None if it has no tables."""
    if isinstance(annotation, type) and issubclass(annotation, pydantic.BaseModel):
        return annotation
    return next(filter(None, map(section, get_args(annotation))), None)


def without_removed(
    kind: type[pydantic.BaseModel], values: dict[str, Any], at: tuple[str | int, ...] = ()
) -> tuple[dict[str, Any], list[Fault]]:
    """The values without those that were settings once (`REMOVED`, in tables too), and a warning for each of these."""
    found: list[Fault] = []
    kept = dict(values)
    for path, instead in getattr(kind, "REMOVED", {}).items():
        table, _, name = path.rpartition(".")
        holder = kept.get(table) if table else kept
        if isinstance(holder, dict) and name in holder:
            found.append(Fault((*at, *path.split(".")), f"it is not a setting any more and has no effect: {instead}"))
            left = {each: value for each, value in holder.items() if each != name}
            kept = {**kept, table: left} if table else left
    for name, field in kind.model_fields.items():
        section, table = field.annotation, kept.get(name)
        if isinstance(section, type) and issubclass(section, ConfigSection) and isinstance(table, dict):
            kept[name], more = without_removed(section, table, (*at, name))
            found += more
    return kept, found


def read(kind: type[C], path: str | os.PathLike[str], warn: Callable[[str], object] = lambda line: None) -> C:
    """The configuration file of a service, checked, with the environment's variables filled in. `warn` is as in
    `parse`. Raises ValueError with one line if it cannot be used."""
    try:
        text = Path(path).read_text()
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: not text: {error}") from None
    return parse(kind, text, str(path), os.environ, warn)


def load(kind: type[C], path: str | os.PathLike[str]) -> C:
    """The configuration file of a service, as `read` returns it, with warnings on stderr; ends the process with one
    line if it cannot be used."""
    try:
        return read(kind, path, lambda line: print(line, file=sys.stderr, flush=True))
    except ValueError as error:
        raise SystemExit(str(error)) from None
