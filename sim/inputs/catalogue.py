"""The models of a replay, from a TOML file.

    [[model]]
    name = "chat-*"            # a name of the trace, or a pattern: every name that it matches is a model of its own
    shape = "8b"               # or weights_bytes and kv_bytes_per_token
    devices = 1                # tensor parallel over so many
    layers = 32                # left out: the shape's, or 32
    active_bytes = 4000000000  # of a mixture of experts: bytes of weights for one token; left out: the shape's, or all
    ttft_ms = 1000             # targets; left out: best effort
    tpot_ms = 50
    context_tokens = 16384     # longer requests are clipped to it, and the report counts them
    pinned = false

The first entry that matches a name counts.
"""

from __future__ import annotations

import tomllib
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from math import inf
from pathlib import Path
from typing import Any

from sim.engines.cost import Shape

SHAPES = {
    "1b": Shape(2_471_645_608, 32_768, layers=16),
    "3b": Shape(6_425_499_648, 114_688, layers=28),
    "8b": Shape(16_060_556_368, 131_072, layers=32),
    "14b": Shape(29_540_000_000, 196_608, layers=48),
    "32b": Shape(65_530_000_000, 262_144, layers=64),
    "70b": Shape(141_106_905_088, 327_680, layers=80),
    "8b-fp8": Shape(9_081_257_984, 131_072, layers=32),
    "32b-fp8": Shape(34_326_243_328, 262_144, layers=64),
    "70b-fp8": Shape(72_669_806_592, 327_680, layers=80),
    "30b-a3b": Shape(61_064_245_248, 98_304, layers=48, active_bytes=6_706_065_408, expert_share=8 / 128),
    "30b-a3b-fp8": Shape(31_176_904_704, 98_304, layers=48, active_bytes=3_988_967_424, expert_share=8 / 128),
    "gpt-oss-20b": Shape(13_761_281_792, 49_152, layers=24, active_bytes=4_866_367_232, expert_share=4 / 32),
}
"""Shapes in bf16: Llama 3's, and Qwen 2.5's of 14B and 32B."""
_FIELDS = {
    "name",
    "shape",
    "weights_bytes",
    "active_bytes",
    "kv_bytes_per_token",
    "devices",
    "layers",
    "ttft_ms",
    "tpot_ms",
    "context_tokens",
    "pinned",
}


class CatalogueError(ValueError):
    """A fault in a catalogue, with its place."""


@dataclass(frozen=True, slots=True)
class Spec:
    """One model. Bytes are of all devices together."""

    name: str
    shape: Shape
    ttft_s: float = inf
    tpot_s: float = inf
    context_tokens: int = 16_384
    pinned: bool = False
    begins_on: str = ""
    """Under Prism, name of the group on which the model comes up the first time, as in a run that is replayed; "":
    placement chooses."""

    @property
    def parts(self) -> int:
        return self.shape.devices


class ModelSet:
    """The catalogue's entries, in the order of the file."""

    def __init__(self, entries: list[Spec]) -> None:
        self._entries = entries
        self._found: dict[str, Spec | None] = {}

    def find(self, name: str) -> Spec | None:
        """The model of that name, or None."""
        if name not in self._found:
            entry = next((e for e in self._entries if fnmatchcase(name, e.name)), None)
            self._found[name] = entry and replace(entry, name=name)
        return self._found[name]


def read(path: Path, slo_scale: float = 1.0) -> ModelSet:
    """The catalogue of a file. `slo_scale` multiplies all targets. Raises CatalogueError, OSError."""
    try:
        document = tomllib.loads(path.read_text())
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise CatalogueError(f"{path}: {error}") from None
    rows = document.get("model")
    if not isinstance(rows, list) or not rows:
        raise CatalogueError(f"{path}: no [[model]] in it")
    if set(document) != {"model"}:
        raise CatalogueError(f"{path}: unknown {', '.join(sorted(set(document) - {'model'}))}")
    return ModelSet([_spec(row, f"{path}, model {number}", slo_scale) for number, row in enumerate(rows, start=1)])


def _spec(row: dict[str, Any], where: str, slo_scale: float) -> Spec:
    if unknown := set(row) - _FIELDS:
        other = "; this is no catalogue of folders, as the services have it" if "path" in unknown else ""
        keys, known = ", ".join(sorted(unknown)), ", ".join(sorted(_FIELDS))
        raise CatalogueError(f"{where}: unknown {keys}; known are {known}{other}")
    name = row.get("name")
    if not isinstance(name, str) or not name:
        raise CatalogueError(f"{where}: it has no name")
    where += f" ({name})"
    for field in (
        "weights_bytes",
        "active_bytes",
        "kv_bytes_per_token",
        "devices",
        "layers",
        "ttft_ms",
        "tpot_ms",
        "context_tokens",
    ):
        value = row.get(field, 1)
        kinds = (int, float) if field.endswith("_ms") else (int,)
        if isinstance(value, bool) or not isinstance(value, kinds) or not 0 < value < inf:
            raise CatalogueError(f"{where}: {field} has to be a number above zero, not {value!r}")
    if not isinstance(row.get("pinned", False), bool):
        raise CatalogueError(f"{where}: pinned has to be true or false, not {row['pinned']!r}")
    if "shape" in row:
        if row["shape"] not in SHAPES:
            raise CatalogueError(f"{where}: no shape {row['shape']!r}; there are {', '.join(SHAPES)}")
        shape = SHAPES[row["shape"]]
    elif "weights_bytes" in row and "kv_bytes_per_token" in row:
        shape = Shape(0, 0)
    else:
        raise CatalogueError(f"{where}: it needs a shape, or weights_bytes and kv_bytes_per_token")
    weights, active = row.get("weights_bytes", shape.weights_bytes), row.get("active_bytes", shape.active_bytes)
    if active > weights:
        raise CatalogueError(f"{where}: active_bytes {active} are more than weights_bytes {weights}")
    return Spec(
        name,
        Shape(
            weights,
            row.get("kv_bytes_per_token", shape.kv_bytes_per_token),
            row.get("devices", 1),
            row.get("layers", shape.layers),
            active,
            shape.expert_share,
        ),
        slo_scale * row["ttft_ms"] / 1e3 if "ttft_ms" in row else inf,
        slo_scale * row["tpot_ms"] / 1e3 if "tpot_ms" in row else inf,
        row.get("context_tokens", 16_384),
        row.get("pinned", False),
    )
