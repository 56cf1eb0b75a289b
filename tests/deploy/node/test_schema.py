import copy
import json
import re
import tomllib
from pathlib import Path

import jsonschema
import pytest

from deploy.node.reading import read
from deploy.node.schema import schema
from deploy.node.targets import SERVE, TARGETS

EXAMPLES = Path(__file__).resolve().parents[3] / "examples"
EXAMPLE = EXAMPLES / "prism.toml"


def test_schema_in_the_tree_is_the_one_that_is_printed():
    assert json.loads((EXAMPLES / "prism.schema.json").read_text()) == schema(), (
        "prism config schema > examples/prism.schema.json"
    )


def test_example_names_the_schema_and_fits_it_and_can_be_used_everywhere():
    assert EXAMPLE.read_text().splitlines()[0] == "#:schema ./prism.schema.json"
    jsonschema.validate(tomllib.loads(EXAMPLE.read_text()), schema())
    for target in (SERVE, *TARGETS.values()):
        assert len(read(EXAMPLE, target).models) == 3


def test_lines_of_the_example_that_are_comments_can_be_used(tmp_path):
    lines = EXAMPLE.read_text().splitlines()[1:]
    settings = [re.sub(r"^# (?=\w+ = )", "", line) for line in lines]
    file = tmp_path / "prism.toml"
    # The models stand there twice, as a list and as tables.
    file.write_text("\n".join(line for line in settings if not line.startswith(("models = ", "nodes = "))))
    jsonschema.validate(tomllib.loads(file.read_text()), schema())
    node = read(file, TARGETS["kubernetes"])
    assert len(node.groups) == 3 and node.loader and node.placement and node.gateway and node.scheduler


@pytest.mark.parametrize(
    "values",
    [
        {"devces": []},
        {"devices": [3]},
        {"models": [{"name": "a"}]},
        {"gateway": {"http": "a:1"}},
        {"gateway": {"cors_orgins": []}},
        {"scheduler": {"engines": {"warm": "one"}}},
        {"loader": {"host_capacity_bytes": 0}},
    ],
)
def test_schema_refuses_what_the_reader_refuses(values, tmp_path):
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(values, schema())


def test_every_setting_has_a_description():
    made = copy.deepcopy(schema())
    parts = {"": made, **{table: made["properties"][table] for table in ("balloond", "loader", "scheduler", "gateway")}}
    for part, of in parts.items():
        for key, value in of["properties"].items():
            described = value.get("description") or made["$defs"].get(value.get("$ref", "").rpartition("/")[2])
            assert described, f"{part}.{key}"
