"""The reference of all services' settings, and how it is written. Pure."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields, replace

from deploy.node.consistency import SERVICES
from gpu_scheduler.engines.sglang.base.options import Options
from prismctl.system.settings import NONE, REQUIRED, SettingRow, binary, rows
from protos import common_pb2
from services.runtime.config import Config

_LARGEST_MODEL = 1 << 50
_HEAD = """\
# Settings

Written by `prismctl config settings --markdown > docs/operate/settings.md` from the services' code; a test fails
when it is not. `prismctl config settings gateway` prints one service's in a terminal.

Every service reads one TOML file, which its command line names: `python -m gateway --config /etc/prism/gateway.toml`.

Where a node is described by `prism.toml` (docs/operate/deploy.md), the files of its services are made of that, and its
tables `[balloond]`, `[loader]`, `[scheduler]` (every gpu_scheduler), `[placement]` and `[gateway]` have the settings
below under the same names: `a.b` of the gateway is `b` in `[gateway.a]`. They go before what is made, and are checked
like a file. Refused there are those that follow from the rest of the description: `name`, `listen`, devices, and the
addresses by which services find each other.

| as shipped | where the files are |
|---|---|
| `prism serve`, `make serve` | NAME.toml in the state folder (`.run` in a checkout), written anew at each start |
| systemd | `/etc/prism/NAME.toml`, from `deploy/systemd/config`; of group N `gpu-scheduler-N.toml` |
| compose | `deploy/compose/config`, in containers `/etc/prism`; `cpu` and `cuda` of them by the device |
| Kubernetes | `deploy/k8s/20-configuration.yaml`, in containers `/etc/prism` |

- **A key that is not listed here, another type or a value out of bounds refuses to start**, in one line that names the
  key. `prismctl config validate FILE...` says so beforehand, and whether the files of one node agree.
- **`${NAME}` in a text is the environment's NAME** when the service reads its file; one that is not set is an error. It
  is for what differs between nodes that have the same file (docs/operate/deploy.md, "A fleet").
- **A change needs a restart.** Read again while the service runs are placement's `groups`, `loaders` and `balloond`,
  and the files that settings name: keys and certificates when they change, the catalogue at SIGHUP.
- `a.b` is the key `b` of the table `[a]`, and `a[].b` that of each `[[a]]`. What a table requires it requires where it
  is there at all. A default of none: as if it were not there.
- The keeper has no file: `python -m balloond.keeper --socket PATH`. What a catalogue lists: the head of
  `loader/catalogue/catalogue.py`. Keys: docs/operate/security.md.
"""
_MARKDOWN = re.compile(r"\\|\*(?=\S)|(?<=\S)\*|<(?=[A-Za-z/!?])")
"""Text that Markdown would not show as it is."""


@dataclass(frozen=True)
class ReferenceSection:
    """Settings under one heading."""

    title: str
    intro: str
    rows: Sequence[SettingRow]


def of_service(name: str) -> list[ReferenceSection]:
    """All settings of one service."""
    return [ReferenceSection(name, _intro(SERVICES[name]), rows(SERVICES[name])), *_options_of(name)]


def of_all() -> list[ReferenceSection]:
    """The settings of all services; those that they have in common come once."""
    common = ReferenceSection("Every service", _intro(Config), rows(Config))
    sections = [common]
    for name, kind in SERVICES.items():
        own = [row for row in rows(kind) if row not in common.rows]
        sections += [ReferenceSection(name, _intro(kind), own), *_options_of(name)]
    return sections


def _intro(kind: type[Config]) -> str:
    return " ".join((kind.__doc__ or "").split())


def _options_of(name: str) -> list[ReferenceSection]:
    """The options that a gpu_scheduler hands on to its engines."""
    if name != "gpu_scheduler":
        return []
    intro = 'Of the engine "sglang". Where only numbers are taken, 1 is yes and 0 is no.'
    return [ReferenceSection("gpu_scheduler: engines.options", intro, options())]


def options() -> list[SettingRow]:
    """Rows of the engine's options, with the defaults that differ on a GPU: a range if they depend on the model's
    size."""
    models = (common_pb2.ModelSpec(weights_bytes=size, devices=1) for size in (_LARGEST_MODEL, 1))
    with_largest, with_smallest = (Options.parse({}, "cuda", model) for model in models)
    found = []
    for field, row in zip(fields(Options), rows(Options, "engines.options."), strict=True):
        least, most = getattr(with_largest, field.name), getattr(with_smallest, field.name)
        said = row.aside and binary(most) or str(most)
        there = f"on a GPU {said if least == most else f'{least} to {most}'}" if str(most) != row.default else ""
        found.append(replace(row, aside="; ".join(filter(None, (row.aside, there)))))
    return found


def as_text(sections: Iterable[ReferenceSection], width: int) -> str:
    """The reference as text for a terminal of so many columns."""
    lines: list[str] = []
    for section in sections:
        lines += ["", section.title, *_wrapped(section.intro, width, "  ")]
        for row in section.rows:
            lines += [
                "",
                *_wrapped(f"{row.key}: {row.type}, {_said(row)}", width, "  ", "    "),
                *_wrapped(row.description, width, "    "),
            ]
    return "\n".join(lines[1:])


def _wrapped(text: str, width: int, indent: str, rest: str = "") -> list[str]:
    return textwrap.wrap(
        text,
        width,
        initial_indent=indent,
        subsequent_indent=rest or indent,
        break_long_words=False,
        break_on_hyphens=False,
    )


def _said(row: SettingRow, code: str = "") -> str:
    """The default of a setting in words; its value stands between two of `code`."""
    if row.default == REQUIRED:
        return REQUIRED
    default = row.default if row.default == NONE else f"{code}{row.default}{code}"
    return f"default {default}" + (f" ({row.aside})" if row.aside else "")


def as_markdown(sections: Iterable[ReferenceSection]) -> str:
    """The reference as docs/operate/settings.md. A paragraph is one line: if it were wrapped, a line might begin with
    what Markdown takes for a list."""
    parts = [_HEAD]
    for section in sections:
        parts.append(f"## {section.title}\n\n{_escaped(section.intro)}\n")
        parts.append("\n".join(map(_item, section.rows)) + "\n")
    return "\n".join(parts)


def _item(row: SettingRow) -> str:
    head = f"- **`{row.key}`** {_escaped(row.type)}, {_said(row, '`')}"
    return f"{head}\\\n  {_escaped(row.description)}" if row.description else head


def _escaped(text: str) -> str:
    """The text with Markdown's characters escaped, except between backticks."""
    parts = text.split("`")
    return "`".join(part if i % 2 else _MARKDOWN.sub(r"\\\g<0>", part) for i, part in enumerate(parts))
