"""The JSON schema of prism.toml, for editors. Made of the classes that check it. Pure."""

from __future__ import annotations

import json
import re
from typing import Any

import pydantic

from deploy.node.consistency import SERVICES
from deploy.node.description import TABLES, NodeDescription
from deploy.node.targets import MADE
from loader.catalogue import catalogue
from services.runtime import docstrings
from services.runtime.config import section

_ENTRY = re.compile(r"^    (\w+) = .*?# (.+(?:\n {6,}# .+)*)", re.MULTILINE)
_DEFS = "$defs"
_DRAFT = "http://json-schema.org/draft-07/schema#"


def schema() -> dict[str, Any]:
    """The schema of the file. Tables of services have the schema of the service's own settings, none of which is
    required, less those that follow from the description."""
    made = _described(NodeDescription)
    for kind, table in TABLES.items():
        service = _described(SERVICES[kind])
        made[_DEFS] |= service.pop(_DEFS, {})
        known = {key: value for key, value in service["properties"].items() if key not in MADE[kind]}
        made["properties"][table] |= {"properties": known, "additionalProperties": False}
    made[_DEFS]["Engines"]["properties"]["options"]["additionalProperties"] = {"type": ["string", "integer"]}
    for key, what in _ENTRY.findall(catalogue.__doc__ or ""):
        known = made[_DEFS]["DescribedModel"]["properties"][key]
        known.setdefault("description", re.sub(r"\n +# ", " ", what))
    used = json.dumps(made)
    made[_DEFS] = {name: part for name, part in made[_DEFS].items() if f"#/{_DEFS}/{name}" in used}
    return {"$schema": _DRAFT, "$comment": "Printed by `prism config schema`.", **made}


def _described(kind: type[pydantic.BaseModel]) -> dict[str, Any]:
    """The schema of a class, with the docstrings of its fields and those of the classes of its tables."""
    made = kind.model_json_schema()
    for each in _classes(kind):
        part = made if each is kind else made.get(_DEFS, {}).get(each.__name__)
        for name, text in docstrings.of_fields(each).items() if part is not None else ():
            if name in part["properties"]:
                part["properties"][name]["description"] = text
    return made


def _classes(kind: type[pydantic.BaseModel]) -> list[type[pydantic.BaseModel]]:
    below = filter(None, (section(field.annotation) for field in kind.model_fields.values()))
    return [kind, *(each for one in below for each in _classes(one))]
