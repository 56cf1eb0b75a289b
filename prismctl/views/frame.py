"""One frame of `prismctl top`, and the output of `prismctl status`: lines of text made of what was seen. Pure."""

from __future__ import annotations

import textwrap
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from math import inf
from typing import Any

from prismctl.views.tables import Column, Row, TableSection, render
from prismctl.views.wording import fault
from services.wording.plurals import counted
from services.wording.sizes import size

_BAR = 50
"""Width in characters of the bar for a device's memory."""
_KINDS = (
    ("W", "weights", "weights_bytes"),
    ("K", "KV of requests", "kv_used_bytes"),
    ("c", "cached prefixes", "kv_cached_bytes"),
    ("r", "reserve", "kv_reserve_bytes"),
    ("p", "private", "private_bytes"),
)
_COLUMNS = (
    Column("model"),
    Column("state"),
    Column("holds", right=True),
    Column("weights", 1, right=True),
    Column("KV used", 1, right=True),
    Column("cached", 3, right=True),
    Column("reserve", 4, right=True),
    Column("private", 4, right=True),
    Column("limit", 6, right=True),
    Column("waiting", right=True),
    Column("late", 5, right=True),
    Column("running", right=True),
    Column("tokens/s", 2, right=True),
    Column("idle", 5, right=True),
)
_STATUS = (
    Column("model"),
    Column("state"),
    Column("waiting", right=True),
    Column("running", right=True),
    Column("KV held", right=True),
    Column("KV limit", 1, right=True),
    Column("idle", 2, right=True),
    Column("tokens/s", 3, right=True),
    Column("weights", 4, right=True),
    Column("demand", 5, right=True),
)


def top(seen: Mapping[str, Any], width: int) -> str:
    """The frame of `top`: bytes of every device by owner, queues, residencies."""
    lines = [*_wrapped(_summary(seen), width), *_away(seen, width)]
    if seen["groups"]:
        lines.append(render(_COLUMNS, _devices(seen), width))
        legend = ", ".join(f"{letter} {what}" for letter, what, _ in _KINDS)
        lines += _wrapped(f"{legend}, x stranded, . free", width)
    return "\n".join([*lines, *_nowhere(seen, width)])


def status(seen: Mapping[str, Any], width: int) -> str:
    """The text of `status`: services, groups, and what each model does there."""
    lines = _away(seen, width) or _wrapped(_all_answer([each["service"] for each in seen["services"]]), width)
    table: list[Row | TableSection] = []
    for group in seen["groups"]:
        free = f"{size(group['free_bytes'])} of {size(group['capacity_bytes'])} free"
        table.append(TableSection(f"{_called(group)}: {free}{_pressure(group)}"))
        for model in group["models"]:
            cells = (
                model["model"],
                model["state"],
                str(model["waiting"]),
                str(model["running"]),
                size(model["kv_held_bytes"]),
                limit(model["kv_limit_bytes"]),
                f"{model['idle_s']:.0f} s",
                _number(model["tokens_per_s"]),
                size(model["weights_bytes"]),
                "" if model["demand"] is None else f"{size(model['demand'])}/s²",
            )
            table.append(Row(cells))
    if table:
        lines.append(render(_STATUS, table, width))
    return "\n".join([*lines, *_nowhere(seen, width)])


def limit(count: int) -> str:
    return "none" if count < 0 else size(count)


def bar(device: Mapping[str, Any], length: int = _BAR) -> str:
    """A device's memory as letters, one for each kind, in proportion. Each kind of which there is a byte shows if there
    is room."""
    parts = [(letter, sum(owner[key] for owner in device["owners"])) for letter, _, key in _KINDS]
    # Bytes that a lease holds and has not reported yet: mapped weights of an engine that comes up, extents on their
    # way.
    untold = device["leased_bytes"] - sum(count for letter, count in parts if letter != "p")
    parts += [("r", max(0, untold)), ("x", device["stranded_bytes"]), (".", device["free_bytes"])]
    capacity = max(1, sum(count for _, count in parts))
    text, ends_at, so_far = "", 0, 0
    for letter, count in parts:
        so_far += count
        ends_at = max(ends_at, round(so_far * length / capacity))
        text += letter * max(ends_at - len(text), 1 if count else 0)
    return text[:length]


def _summary(seen: Mapping[str, Any]) -> str:
    on_groups = [model for group in seen["groups"] for model in group["models"]]
    parts = [counted(len(seen["groups"]), "group")]
    if seen["models"] is not None:
        states = Counter(model["state"] for model in seen["models"])
        told = ", ".join(f"{count} {state}" for state, count in states.most_common())
        parts.append(counted(len(seen["models"]), "model") + (f" ({told})" if told else ""))
    parts += [f"{sum(model[key] for model in on_groups)} {key}" for key in ("waiting", "running")]
    rates = [model["tokens_per_s"] for model in on_groups if model["tokens_per_s"] is not None]
    if rates:
        parts.append(f"{sum(rates):.0f} tokens/s")
    if seen["images"] is not None:
        parts.append(f"images {size(seen['images']['used_bytes'])} of {size(seen['images']['capacity_bytes'])}")
    return "; ".join(parts)


def _all_answer(names: Sequence[str]) -> str:
    count = len(names)
    who = f"all {count} services answer" if count > 1 else "1 service answers"
    return f"{who}: {', '.join(names)}"


def _away(seen: Mapping[str, Any], width: int) -> list[str]:
    lines = _wrapped(seen["hint"], width) if seen["hint"] else []
    for each in seen["services"]:
        if not each["answers"]:
            lines += _wrapped(f"does not answer: {each['service']} ({each['address']}): {each['problem']}", width)
    for group in seen["groups"]:
        if group["error"]:
            lines += _wrapped(f"{group['group']} says: {group['error']}", width)
        if group["engines_error"]:
            lines += _wrapped(f"{group['group']} says: no engine is warm: {group['engines_error']}", width)
    return lines


def _nowhere(seen: Mapping[str, Any], width: int) -> list[str]:
    """Lines for models of the catalogue that are on no group, and for errors of any model."""
    here = {model["model"] for group in seen["groups"] for model in group["models"]}
    lines = []
    nowhere = [model for model in seen["models"] or () if model["model"] not in here and not model["error"]]
    away = [model for model in nowhere if not model["base"]]
    for base in sorted({model["base"] for model in nowhere if model["base"]}):
        adapters = [model["model"] for model in nowhere if model["base"] == base]
        lines += _wrapped(f"adapters of {base}: {', '.join(adapters)}", width)
    if away:
        lines += _wrapped("on no group: " + ", ".join(f"{each['model']} ({each['state']})" for each in away), width)
    for model in seen["models"] or ():
        if model["error"]:
            lines += _wrapped(f"error: {model['model']}: {fault(model)}", width)
    return lines


def _devices(seen: Mapping[str, Any]) -> Iterator[Row | TableSection]:
    for group in seen["groups"]:
        several = len(group["devices"]) > 1
        if several or not group["devices"]:
            yield TableSection(f"{_called(group)}{_pressure(group)}")
        for number, device in enumerate(group["devices"]):
            name = device["device"] if several else _called(group)
            used = device["capacity_bytes"] - device["free_bytes"]
            of = f"{size(used)} of {size(device['capacity_bytes'])}, {size(device['free_bytes'])} free"
            yield TableSection(f"{name}: {of}{'' if several else _pressure(group)}")
            yield TableSection(f"  [{bar(device)}]")
            yield from _owners(group, device, with_queue=number == 0)


def _owners(group: Mapping[str, Any], device: Mapping[str, Any], with_queue: bool) -> Iterator[Row]:
    """Rows of models that hold memory, and of models with a queue; queues are the group's, and stand with its first
    device."""
    owners = {owner["model"]: owner for owner in device["owners"]}
    models = {model["model"]: model for model in group["models"]}
    names = sorted(owners.keys() | (models.keys() if with_queue else set()))
    for name in names:
        owner, model = owners.get(name), models.get(name)
        held = _held(owner) if owner is not None else ("0 B", *("",) * 6)
        queue = _queue(model) if model is not None and with_queue else ("",) * 5
        state = model["state"] if model is not None else "leaving"
        yield Row((name, state, *held, *queue))


def _held(owner: Mapping[str, Any]) -> tuple[str, ...]:
    holds = owner["weights_bytes"] + owner["kv_bytes"] + owner["private_bytes"]
    keys = ("weights_bytes", "kv_used_bytes", "kv_cached_bytes", "kv_reserve_bytes", "private_bytes")
    return (size(holds), *(size(owner[key]) for key in keys), limit(owner["limit_bytes"]))


def _queue(model: Mapping[str, Any]) -> tuple[str, ...]:
    return (
        str(model["waiting"]),
        _number(model["late"]),
        str(model["running"]),
        _number(model["tokens_per_s"]),
        f"{model['idle_s']:.0f} s",
    )


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.0f}"


def _called(group: Mapping[str, Any]) -> str:
    notes = [note for note, so in (("away", not group["answers"]), ("drained", group["drained"])) if so]
    return f"{group['group']} ({', '.join(notes)})" if notes else str(group["group"])


def _pressure(group: Mapping[str, Any]) -> str:
    pressure = group["pressure"]
    return "" if pressure is None else f", pressure {'infinite' if pressure == inf else f'{pressure:.3f}'}"


def _wrapped(text: str, width: int) -> list[str]:
    return textwrap.wrap(text, width, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False)
