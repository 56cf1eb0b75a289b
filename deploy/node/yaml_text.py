"""YAML as people read it: no aliases, keys in their order, texts of several lines as blocks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import yaml


class _Dumper(yaml.SafeDumper):
    def ignore_aliases(self, data: Any) -> bool:
        return True


def _text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None)


_Dumper.add_representer(str, _text)


def dumps(documents: Sequence[Any]) -> str:
    return str(yaml.dump_all(documents, Dumper=_Dumper, sort_keys=False, width=120, allow_unicode=True))


def renamed(value: Any, texts: dict[str, str]) -> Any:
    """A copy in which each of the texts, a number's too, has become another one."""
    written = dumps([value])
    for old, new in texts.items():
        written = written.replace(old, new)
    return yaml.safe_load(written)
