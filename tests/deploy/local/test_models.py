import os
from pathlib import Path

import pytest

from deploy.local.bundled import BUNDLED
from deploy.local.models import check_names, described, named, read_all, sizes, write_catalogue
from deploy.node.description import NodeDescription
from loader.catalogue import catalogue
from loader.checkpoints import checkpoint
from services.errors import Invalid
from tests.loader import checkpoint_files

GPU = sizes(on_gpus=True)


def test_model_is_named_as_its_folder_unless_a_name_is_given(tmp_path):
    one, other = checkpoint_files.write(tmp_path / "small-1b"), checkpoint_files.write(tmp_path / "a b")
    write_catalogue([str(one), f"large={other}"], tmp_path / "c.toml", GPU)
    listed = catalogue.read(tmp_path / "c.toml")
    assert [(model.name, model.path) for model in listed] == [("small-1b", str(one)), ("large", str(other))]


@pytest.mark.parametrize(
    ("argument", "name", "path"),
    [
        ("m=/models/a", "m", "/models/a"),
        ("m=/models/v=3/a", "m", "/models/v=3/a"),
        ("/models/v=3/a", "a", "/models/v=3/a"),
        ("/models/a/", "a", "/models/a"),
        ("a", "a", "HERE/a"),
        ("./v=3/a", "a", "HERE/v=3/a"),
        ("../v=3/a", "a", "HERE/../v=3/a"),
        ("runs/v=3/a", "a", "HERE/runs/v=3/a"),
        ("m=v=3/a", "m", "HERE/v=3/a"),
        ("m=../a", "m", "HERE/../a"),
        ("m=~/a", "m", "HOME/a"),
        ("~/a", "a", "HOME/a"),
        ("~/v=3/a/", "a", "HOME/v=3/a"),
        ("org/m=/models/a", "org/m", "/models/a"),
        ("org/m=~/v=3/a", "org/m", "HOME/v=3/a"),
        ("org/m=./a", "org/m", "HERE/a"),
        ("=a", "=a", "HERE/=a"),
    ],
)
def test_model_argument_before_its_first_equals_sign_is_the_name_unless_it_is_part_of_a_path(
    tmp_path, monkeypatch, argument, name, path
):
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    path = path.replace("HERE", str(tmp_path / "here")).replace("HOME", str(tmp_path / "home"))
    assert named(argument) == (name, Path(os.path.normpath(path)))


def test_bundled_model_is_named_by_its_word_and_never_by_a_path(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    assert named("smollm2") == ("smollm2", BUNDLED["smollm2"])
    assert named("chat=smollm2") == ("chat", BUNDLED["smollm2"])
    assert named("./smollm2") == ("smollm2", tmp_path / "smollm2")


def test_described_model_is_its_folder_or_else_what_its_name_stands_for(tmp_path):
    (tmp_path / "org" / "here").mkdir(parents=True)
    paths = ["org/here", "org/away@v1", "smollm2", "gone"]
    node = NodeDescription(models=paths).placed(tmp_path)
    assert described(node) == [
        f"org/here={tmp_path}/org/here",
        "org/away=org/away@v1",
        f"smollm2={BUNDLED['smollm2']}",
        f"gone={tmp_path}/gone",
    ]
    (tmp_path / "smollm2").mkdir()
    assert described(node)[2] == f"smollm2={tmp_path}/smollm2"


def test_models_of_a_catalogue_are_read_as_a_loader_on_the_cpu_reads_them(tmp_path):
    folder = checkpoint_files.write(tmp_path / "m")
    (tmp_path / "c.toml").write_text(
        f'[[model]]\nname = "m"\npath = "{folder}"\n[[model]]\nname = "away"\npath = "/nowhere"\n'
    )
    here, away = read_all(tmp_path / "c.toml")
    assert here.checkpoint == checkpoint.read(folder, 4) and here.quota_bytes == 1 << 20
    assert "does not exist" in away.error
    (tmp_path / "c.toml").write_text("[[model]]")
    with pytest.raises(Invalid, match="c.toml"):
        read_all(tmp_path / "c.toml")


def test_model_argument_that_is_an_existing_folder_is_that_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "org" / "m=" / "a").mkdir(parents=True)
    assert named("org/m=/a") == ("a", tmp_path / "org" / "m=" / "a")


def test_model_folder_that_is_a_link_has_the_name_of_the_link(tmp_path):
    (tmp_path / "current").symlink_to(checkpoint_files.write(tmp_path / "v3"))
    assert named(str(tmp_path / "current")) == ("current", tmp_path / "current")


def test_a_folder_that_is_no_model_is_an_error_of_its_model_with_its_path(tmp_path):
    (tmp_path / "empty").mkdir()
    cut = checkpoint_files.write(tmp_path / "cut")
    (cut / "model.safetensors").unlink()
    good = checkpoint_files.write(tmp_path / "v=3")
    models = [f"e={tmp_path}/empty", f"g={good}", str(cut), "/nowhere"]
    assert write_catalogue(models, tmp_path / "c.toml", GPU) == {
        "e": f"{tmp_path}/empty: its folder is empty",
        "cut": f"{cut}: no weights: neither model.safetensors nor model.safetensors.index.json",
        "nowhere": "/nowhere: its folder does not exist",
    }
    assert [model.name for model in catalogue.read(tmp_path / "c.toml")] == ["e", "g", "cut", "nowhere"]


def test_folders_of_which_none_is_a_model_are_all_named(tmp_path):
    (tmp_path / "empty").mkdir()
    with pytest.raises(Invalid) as error:
        write_catalogue([f"m={tmp_path}/empty", "/nowhere"], tmp_path / "c.toml", GPU)
    assert str(error.value).splitlines() == [
        "no model can be served:",
        f"  m: {tmp_path}/empty: its folder is empty",
        "  nowhere: /nowhere: its folder does not exist",
    ]


def test_model_path_of_any_characters_is_listed_unchanged(tmp_path):
    folder = checkpoint_files.write(tmp_path / 'a "b" \\ é 😀')
    write_catalogue([f"m={folder}"], tmp_path / "c.toml", GPU)
    (listed,) = catalogue.read(tmp_path / "c.toml")
    assert listed.path == str(folder)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["a b={}"], "'a b' cannot be the name of a model, of {}: give it another as NAME=PATH"),
        (["{}/v=3"], "'v=3' cannot be the name of a model, of {}/v=3: give it another as NAME=PATH"),
        (["m={}", "m=/other"], "the name 'm' is given twice, for {} and /other: give names as NAME=PATH"),
        (["{}", "{}/"], "the name 'm' is given twice, for {}: give names as NAME=PATH"),
        (["m="], "'m=' names no folder; write NAME=PATH"),
    ],
)
def test_impossible_model_names_are_refused_in_one_line(tmp_path, arguments, says):
    folder = checkpoint_files.write(tmp_path / "m")
    with pytest.raises(Invalid) as error:
        write_catalogue([argument.format(folder) for argument in arguments], tmp_path / "c.toml", GPU)
    assert str(error.value) == says.format(folder)


def test_described_model_is_checked_as_its_entry_says(tmp_path):
    folder = checkpoint_files.write(tmp_path / "new", architectures=["OlmoForCausalLM"])
    said = [f"a={folder}", f"b={folder}", f"c={checkpoint_files.write(tmp_path / 'c')}"]
    more = {"a": {"unverified": True}, "c": {"context_tokens": 1 << 30}}
    faults = write_catalogue(said, tmp_path / "c.toml", GPU, more)
    assert faults.keys() == {"b", "c"} and "unverified" in faults["b"] and "context_tokens" in faults["c"]


@pytest.mark.parametrize(
    "models", [("a=org/one", "a=org/other"), ("org/one", "org/one@v1"), ("smollm2", "smollm2=org/m")]
)
def test_names_of_models_of_the_hub_are_checked_without_fetching_them(models):
    with pytest.raises(Invalid, match="is given twice"):
        check_names(models)
