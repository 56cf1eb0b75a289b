"""Fetching, against a hub on this machine."""

import json

import pytest
from huggingface_hub import constants

from deploy.hub.fetching import FetchFailed, Hub
from deploy.hub.names import parse
from testing import small_adapters
from testing.hub import hub
from tests.loader import checkpoint_files

CPU = 4
MODEL = "org/model"
NOWHERE = "http://127.0.0.1:9"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return checkpoint_files.write(tmp_path_factory.mktemp("checkpoint"))


@pytest.fixture
def remote(folder):
    with hub() as remote:
        remote.publish(MODEL, folder)
        yield remote


@pytest.fixture
def fetch(remote, tmp_path, monkeypatch):
    """Fetches a model into a cache of the test's own; `fetch.said` has what it tells."""

    def fetch(*texts, endpoint=None, adapters=False):
        hub = Hub(fetch.said.append, endpoint or remote.address, tmp_path / "hub", adapters=adapters)
        folders = list(hub.fetch([parse(text) for text in texts or (MODEL,)], CPU))
        return folders[0] if len(folders) == 1 else folders

    fetch.said = []
    monkeypatch.delenv("HF_TOKEN", raising=False)
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "token"))
    return fetch


def refused(fetch, *given, **named):
    with pytest.raises(FetchFailed) as error:
        fetch(*given, **named)
    assert "\n" not in str(error.value)
    return str(error.value)


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_model_is_fetched_once_and_is_the_published_one(remote, fetch, folder):
    got = fetch()
    assert contents(got) == contents(folder)
    assert fetch.said[0].startswith(f"{MODEL}: fetching ") and remote.repositories[MODEL].revisions["main"] == got.name
    remote.asked.clear()
    assert fetch() == got
    assert remote.fetched() == [] and fetch.said[-1].endswith(f"is in {got.parents[2]}")


def test_adapter_is_fetched_where_one_will_do_and_is_checked(remote, fetch, folder, tmp_path):
    adapter = contents(small_adapters.write(folder, tmp_path / "adapter"))
    remote.publish("org/adapter", adapter | {"README.md": b"-"})
    assert "it is an adapter (LoRA)" in refused(fetch, "org/adapter")
    assert contents(fetch("org/adapter", adapters=True)) == adapter
    assert contents(fetch("org/adapter", adapters=True, endpoint=NOWHERE)) == adapter
    remote.publish("org/broken", adapter | {"adapter_config.json": b'{"peft_type": "IA3"}'})
    assert "only 'LORA' is served" in refused(fetch, "org/broken", adapters=True)


def test_a_new_commit_of_a_branch_is_fetched_and_only_what_is_new(remote, fetch, folder):
    first = fetch()
    remote.publish(MODEL, contents(folder) | {"generation_config.json": b'{"temperature": 0.5}'})
    remote.asked.clear()
    second = fetch()
    assert second != first and remote.fetched() == ["generation_config.json"]
    assert fetch(f"{MODEL}@{first.name}") == first


def test_connection_that_breaks_is_taken_up_where_it_broke(remote, fetch, folder, monkeypatch):
    monkeypatch.setattr(constants, "DOWNLOAD_CHUNK_SIZE", 500)
    remote.cut_after["model.safetensors"] = 1000
    assert contents(fetch()) == contents(folder)
    assert [asked for *_, asked in remote.asked if asked] == ["bytes=1000-"]


def test_sharded_weights_come_without_duplicates_beside_them(remote, fetch, tmp_path):
    sharded = checkpoint_files.write(tmp_path / "sharded", shards=2)
    there = contents(sharded)
    remote.publish("org/sharded", there | {"consolidated.safetensors": b"x", "original/model.pth": b"x"})
    assert contents(fetch("org/sharded")) == there


def test_class_that_is_not_served_is_refused_before_weights_of_any_model_come(remote, fetch, folder):
    config = json.loads((folder / "config.json").read_bytes()) | {"architectures": ["MambaForCausalLM"]}
    remote.publish("org/mamba", contents(folder) | {"config.json": json.dumps(config).encode()})
    said = refused(fetch, MODEL, "org/mamba")
    assert said.startswith("org/mamba cannot be served: the architecture MambaForCausalLM is not supported")
    assert remote.fetched() == ["config.json", "config.json"]


def test_repository_without_safetensors_is_refused_before_anything_comes(remote, fetch):
    remote.publish("org/old", {"config.json": b"{}", "pytorch_model.bin": b"x"})
    assert refused(fetch, "org/old").startswith("org/old cannot be served: its weights are pickled files only")
    assert remote.fetched() == []


def test_weights_that_are_not_those_of_the_config_are_refused(remote, fetch, folder):
    remote.publish("org/broken", contents(folder) | {"model.safetensors": b"\x00" * 16})
    assert "org/broken cannot be served: model.safetensors" in refused(fetch, "org/broken")


def test_download_that_the_disk_has_no_room_for_is_refused_before_weights_come(remote, fetch):
    remote.repositories[MODEL].sizes["model.safetensors"] = 1 << 50
    said = refused(fetch)
    assert f"{MODEL}: 1126 TB are to be fetched, and the disk of " in said and "HF_HOME" in said
    assert remote.fetched() == ["config.json"]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("org/modle", "has no model org/modle, or it is private and HF_TOKEN does not open it (no token is set)"),
        ("other/model", f"It has {MODEL}"),
        (f"{MODEL}@v2", f"{MODEL} has no revision 'v2'"),
        (f"{MODEL}@{'0' * 40}", f"has no revision '{'0' * 40}'"),
    ],
)
def test_name_or_revision_that_is_not_there_is_said_by_name(fetch, text, words):
    assert words in refused(fetch, text)


def test_gated_model_says_where_to_accept_its_licence_and_opens_to_its_token(remote, fetch, monkeypatch):
    remote.repositories[MODEL].token = "hf_right"
    assert f"accept its licence at {remote.address}/{MODEL}, and set HF_TOKEN" in refused(fetch)
    monkeypatch.setenv("HF_TOKEN", "hf_wrong")
    assert "the hub refuses the token (401, Invalid credentials in Authorization header)" in refused(fetch)
    monkeypatch.setenv("HF_TOKEN", "hf_right")
    assert fetch().is_dir()


def test_hub_that_is_away_is_no_matter_for_what_the_cache_has(remote, fetch, monkeypatch):
    absent = refused(fetch, endpoint=NOWHERE)
    assert f"does not have it, and the hub at {NOWHERE} cannot be reached" in absent
    got = fetch()
    assert fetch(endpoint=NOWHERE) == got
    assert fetch.said[-1].startswith(f"{MODEL}: the hub at {NOWHERE} cannot be reached")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert fetch() == got and "HF_HUB_OFFLINE is set" in fetch.said[-1]
    (got / "model.safetensors").unlink()
    assert "has only a part of it, and HF_HUB_OFFLINE is set" in refused(fetch)


def test_hub_that_is_none_is_named(remote, fetch):
    assert "HF_ENDPOINT is hub.local" in refused(fetch, endpoint="hub.local")
    assert "is no hub" in refused(fetch, endpoint=f"{remote.address}/elsewhere")


def test_cache_that_cannot_be_written_is_named(fetch, tmp_path):
    (tmp_path / "hub").write_text("")
    assert f"{tmp_path / 'hub'}" in refused(fetch)
