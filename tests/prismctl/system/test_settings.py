"""What a class says of the settings that it checks, and the reference that is made of it."""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal

import pytest
from pydantic import AfterValidator, BaseModel, Field
from typer.testing import CliRunner

from deploy.node.consistency import SERVICES
from gpu_scheduler.engines.sglang.base.options import Options
from prismctl.__main__ import app
from prismctl.system import reference
from prismctl.system.settings import NONE, REQUIRED, rows
from services.runtime.config import Config

DOCUMENT = Path(__file__).resolve().parents[3] / "docs" / "operate" / "settings.md"
WRITE_IT = "prismctl config settings --markdown > docs/operate/settings.md"
Address = Annotated[str, AfterValidator(str.strip)]
Named = Annotated[str, AfterValidator(str.strip), "address"]


class Base(BaseModel):
    """What has a base."""

    name: str
    """From
    the   base."""
    kept: int = 0
    """Of the base."""


class Leaf(Base):
    """A leaf."""

    kept: int = 1
    own: int = 2
    """Its own."""


class Device(BaseModel):
    """A device."""

    size: int = Field(ge=0)


class Whole(BaseModel):
    flag: bool = True
    count: Annotated[int, Field(ge=1, lt=8)] = 4
    share: float = Field(default=0.05, ge=0, le=1)
    wait_s: float = Field(default=10.0, gt=0)
    wait_ms: int = 5
    tokens_per_s: float = 1e6
    chunk_bytes: int = Field(default=32 << 20, multiple_of=4096)
    odd_bytes: int = 1000
    most_bytes: int | None = None
    colour: Literal["red", "green", "blue"] = "red"
    dtype: Literal[2, 4] = 4
    text: str
    quoted: str = 'a "b"'
    listed: list[str] = Field(min_length=1)
    table: dict[str, str] = {"a": "b"}
    address: Address = ""
    named: Named = ""
    named_or_none: Named | None = None
    addresses: list[Named] = []
    made: list[int] = Field(default_factory=lambda: [1, 2])


class Nested(BaseModel):
    part: Leaf = Leaf(name="x")
    """Said where it is used."""
    maybe: Device | None = None
    devices: list[Device]
    last: int = 0


@dataclass
class Plain:
    a: int = 1
    """The first."""
    b: list[str] = field(default_factory=list)
    c: Named = ""
    d: str = field(kw_only=True)


def by_key(kind):
    return {row.key: row for row in rows(kind)}


def test_settings_have_types_bounds_and_defaults_in_words():
    assert {row.key: (row.type, row.default) for row in rows(Whole)} == {
        "flag": ("true or false", "true"),
        "count": ("whole number >= 1 and < 8", "4"),
        "share": ("number >= 0 and <= 1", "0.05"),
        "wait_s": ("seconds > 0", "10"),
        "wait_ms": ("whole milliseconds", "5"),
        "tokens_per_s": ("number", "1e+06"),
        "chunk_bytes": ("bytes a multiple of 4096", "33554432"),
        "odd_bytes": ("bytes", "1000"),
        "most_bytes": ("bytes", NONE),
        "colour": ('"red", "green" or "blue"', '"red"'),
        "dtype": ("2 or 4", "4"),
        "text": ("text", REQUIRED),
        "quoted": ("text", r'"a \"b\""'),
        "listed": ("list of text of at least 1", REQUIRED),
        "table": ("table of text", '{"a" = "b"}'),
        "address": ("text", '""'),
        "named": ("address", '""'),
        "named_or_none": ("address", NONE),
        "addresses": ("list of addresses", "[]"),
        "made": ("list of whole numbers", "[1, 2]"),
    }


def test_bytes_are_written_in_the_largest_unit_that_divides_them():
    assert [(row.key, row.aside) for row in rows(Whole) if row.aside] == [("chunk_bytes", "32 MiB")]


def test_docstring_below_a_field_describes_it_also_in_a_base_class():
    found = by_key(Leaf)
    assert list(found) == ["name", "kept", "own"]
    assert found["name"].description == "From the base."
    assert (found["kept"].default, found["kept"].description) == ("1", "Of the base.")
    assert found["own"].description == "Its own."


def test_field_without_a_docstring_has_an_empty_description():
    assert {row.description for row in rows(Whole)} == {""}


def test_settings_table_has_a_row_followed_by_those_of_its_keys():
    assert [(row.key, row.type, row.default, row.description) for row in rows(Nested)] == [
        ("part", "table", '{"name" = "x"}', "Said where it is used."),
        ("part.name", "text", REQUIRED, "From the base."),
        ("part.kept", "whole number", "1", "Of the base."),
        ("part.own", "whole number", "2", "Its own."),
        ("maybe", "table", NONE, "A device."),
        ("maybe.size", "whole number >= 0", REQUIRED, ""),
        ("devices", "list of tables", REQUIRED, "A device."),
        ("devices[].size", "whole number >= 0", REQUIRED, ""),
        ("last", "whole number", "0", ""),
    ]


def test_dataclass_fields_have_the_same_rows_as_those_of_a_model():
    assert [(row.key, row.type, row.default, row.description) for row in rows(Plain, "in.")] == [
        ("in.a", "whole number", "1", "The first."),
        ("in.b", "list of text", "[]", ""),
        ("in.c", "address", '""', ""),
        ("in.d", "text", REQUIRED, ""),
    ]


# The services' own.


def test_settings_reference_has_every_setting_of_a_service_and_common_ones_once():
    sections = reference.of_all()
    told = [(section.title, row.key) for section in sections for row in section.rows]
    assert len(told) == len(set(told))
    for name, kind in SERVICES.items():
        here = {key for title, key in told if title in (name, "Every service")}
        assert here >= set(kind.model_fields)
        assert not set(Config.model_fields) & {key for title, key in told if title == name}


def test_options_of_engines_say_what_differs_on_a_gpu():
    found = {row.key.removeprefix("engines.options."): row for row in reference.options()}
    assert list(found) == list(Options.__dataclass_fields__)
    assert (found["page_size"].default, found["page_size"].aside) == ("1", "on a GPU 16")
    assert found["kv_span_bytes"].aside == "8 GiB; on a GPU 192 GiB"
    assert found["prefill_graph_tokens"].aside == "on a GPU 512 to 2048"
    assert found["soft_wait_ms"].aside == ""


def test_markdown_characters_are_escaped_outside_of_code():
    row = reference.SettingRow("a", "text", REQUIRED, "", "*all* of <a> and `*b*`, x * y <= z")
    (_, text) = reference.as_markdown([reference.ReferenceSection("s", "", [row])]).rstrip().splitlines()[-2:]
    assert text == r"  \*all\* of \<a> and `*b*`, x * y <= z"


# The command.


def run(*arguments, **environment):
    return CliRunner().invoke(app, ["config", "settings", *arguments], env=environment)


def test_settings_of_one_service_fit_the_terminal_and_include_common_ones():
    result = run("gateway", COLUMNS="60")
    assert result.exit_code == 0
    lines = result.stdout.splitlines()
    assert max(map(len, lines)) <= 60
    at = lines.index("  most_in_flight: whole number >= 1, default 1024")
    assert lines[at + 1] == "    Most answers that are under way at once (a request with"
    assert any(line.startswith("  listen: ") for line in lines)
    assert not any("idle_s" in line for line in lines)


def test_settings_of_all_services_are_printed_as_text_or_json():
    result = run("--json")
    told = json.loads(result.stdout)
    assert [section["title"] for section in told][:3] == ["Every service", "balloond", "loader"]
    (drain,) = (row for row in told[0]["rows"] if row["key"] == "drain_s")
    assert drain == {
        "key": "drain_s",
        "type": "seconds >= 0 and <= 86400",
        "default": "10",
        "aside": "",
        "description": "How long a stop waits for what is under way.",
    }
    assert run().stdout.startswith("Every service\n")


@pytest.mark.parametrize("arguments", [["nobody"], ["gateway", "--markdown"], ["--json", "--markdown"]])
def test_settings_command_with_wrong_arguments_exits_with_status_2(arguments):
    assert run(*arguments).exit_code == 2


def test_settings_document_is_what_the_code_generates():
    assert DOCUMENT.read_text() == run("--markdown").stdout, f"docs/operate/settings.md is old: {WRITE_IT}"
