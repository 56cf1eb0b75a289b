"""Adapters among the models of a catalogue: what they have of their base, and what is wrong where that is not one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from loader import wire
from loader.catalogue.catalogue import CatalogueEntry
from loader.catalogue.models import NodeModels, Sizes, adapter_fault
from loader.checkpoints.errors import BrokenCheckpoint
from protos import common_pb2
from testing import small_adapters
from tests.loader import checkpoint_files
from tests.loader.fakes import FakeKeeper

SIZES = Sizes(dtype_bytes=4, kv_extent_bytes=10_000, quota_bytes=77)


@pytest.fixture
def models() -> NodeModels:
    return NodeModels(SIZES, lambda: None, FakeKeeper())


@pytest.fixture
def base(tmp_path: Path) -> Path:
    return checkpoint_files.write(tmp_path / "base")


def spec(models: NodeModels, name: str) -> common_pb2.ModelSpec:
    return wire.model_spec(models.get(name), models.by_name)


def entry(models: NodeModels, name: str) -> Any:
    return wire.entry(models.get(name), [], models=models.by_name)


async def test_an_adapter_is_as_its_base_but_for_its_own_and_its_base_has_room_for_it(
    models: NodeModels, base: Path, tmp_path: Path
) -> None:
    await models.add(CatalogueEntry(name="base", path=str(base), ttft_ms=100, tool_parser="hermes", aliases=("main",)))
    alone = spec(models, "base")
    assert not alone.HasField("adapters")
    for name, keys, own in (
        ("a", {"rank": 4}, {"aliases": ("desk",)}),
        ("b", {"rank": 8, "modules": ("q_proj",)}, {"ttft_ms": 5}),
    ):
        path = small_adapters.write(base, tmp_path / name, **keys)
        await models.add(CatalogueEntry(name=name, path=str(path), base="base", **own))
    a, b, whole = (spec(models, name) for name in ("a", "b", "base"))
    assert (whole.adapters.slots, whole.adapters.rank, len(whole.adapters.modules)) == (3, 8, 7)
    assert whole.weights_bytes == alone.weights_bytes + whole.adapters.bytes and whole.adapters.bytes > 0
    assert (a.name, a.path, a.context_tokens, a.tool_parser) == ("a", str(base), 64, "hermes")
    assert (a.adapter.base, a.adapter.rank, a.adapter.path) == ("base", 4, str(tmp_path / "a"))
    assert (a.default_slo.ttft_ms, b.default_slo.ttft_ms) == (100, 5)
    assert b.weights_bytes == 2 * 8 * (32 + 32) * 4 and list(b.adapter.modules) == ["q_proj"]
    assert (a.floor_bytes, a.quota_bytes, a.pinned, *a.aliases) == (0, 0, False, "desk")
    # It goes, and comes back to a base that is another model now.
    await models.remove("base")
    assert "its base 'base' is not in the catalogue" in entry(models, "a").error
    config = {**checkpoint_files.LLAMA, "hidden_size": 64}
    other = checkpoint_files.write(tmp_path / "other", config)
    await models.add(CatalogueEntry(name="base", path=str(other)))
    assert "it is for another model" in entry(models, "a").error and not spec(models, "base").HasField("adapters")


@pytest.mark.parametrize(
    ("of", "why"),
    [
        ("nobody", "its base 'nobody' is not in the catalogue"),
        ("a", "its base 'a' is an adapter itself, of 'base'"),
        ("two", "adapters of a model on 2 devices are not served"),
    ],
)
async def test_an_adapter_without_a_base_that_takes_it_is_not_added(
    models: NodeModels, base: Path, tmp_path: Path, of: str, why: str
) -> None:
    path = str(small_adapters.write(base, tmp_path / "a"))
    await models.add(CatalogueEntry(name="base", path=str(base)))
    await models.add(CatalogueEntry(name="two", path=str(base), devices=2))
    await models.add(CatalogueEntry(name="a", path=path, base="base"))
    with pytest.raises(BrokenCheckpoint, match=why):
        await models.add(CatalogueEntry(name="c", path=path, base=of))
    assert models.find("c") is None


async def test_adapters_of_a_file_that_are_bases_of_each_other_are_errors_and_others_are_served(
    models: NodeModels, base: Path, tmp_path: Path
) -> None:
    path = small_adapters.write(base, tmp_path / "a")
    rows = [("base", base, ""), ("x", path, "y"), ("y", path, "x"), ("good", path, "base")]
    file = tmp_path / "catalogue.toml"
    file.write_text(
        "".join(
            f"[[model]]\nname = {json.dumps(name)}\npath = {json.dumps(str(at))}\n"
            + (f"base = {json.dumps(of)}\n" if of else "")
            for name, at, of in rows
        )
    )
    await models.reload(str(file))
    faults = {name: adapter_fault(models.get(name), models.by_name) for name in ("x", "y", "good")}
    assert faults == {
        "x": "its base 'y' is an adapter itself, of 'x'",
        "y": "its base 'x' is an adapter itself, of 'y'",
        "good": "",
    }
    assert spec(models, "base").adapters.slots == 2


@pytest.mark.parametrize("keys", [{"devices": 2}, {"engine": "echo"}, {"pinned": True}, {"context_tokens": 5}])
def test_an_adapter_has_the_settings_of_its_base(keys: dict[str, Any]) -> None:
    (name,) = keys
    with pytest.raises(ValueError, match=f"an adapter takes {name} from its base"):
        CatalogueEntry(name="a", path="/a", base="base", **keys)
    with pytest.raises(ValueError, match="cannot be its own base"):
        CatalogueEntry(name="a", path="/a", base="a")
