import pytest

from deploy.local.bundled import BUNDLED
from deploy.local.models import named, read_all, write_catalogue
from loader import catalogue, checkpoint
from services.errors import Invalid
from tests.loader import checkpoints


def test_a_model_is_named_as_its_folder_unless_told_otherwise(tmp_path):
    one, other = checkpoints.write(tmp_path / "small-1b"), checkpoints.write(tmp_path / "a b")
    write_catalogue([str(one), f"large={other}"], tmp_path / "c.toml", 2)
    listed = catalogue.read(tmp_path / "c.toml")
    assert [(model.name, model.path) for model in listed] == [("small-1b", str(one)), ("large", str(other))]


def test_a_folder_may_be_relative_or_in_the_home(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    assert named("~/m/") == ("m", (tmp_path / "m").resolve())


def test_a_word_stands_for_its_folder_and_a_path_never_does(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    assert named("smollm2") == ("smollm2", BUNDLED["smollm2"])
    assert named("chat=smollm2") == ("chat", BUNDLED["smollm2"])
    assert named("./smollm2") == ("smollm2", tmp_path / "smollm2")


def test_models_of_a_catalogue_are_read_as_a_loader_on_the_cpu_reads_them(tmp_path):
    folder = checkpoints.write(tmp_path / "m")
    (tmp_path / "c.toml").write_text(
        f'[[model]]\nname = "m"\npath = "{folder}"\n[[model]]\nname = "away"\npath = "/nowhere"\n'
    )
    here, away = read_all(tmp_path / "c.toml")
    assert here.checkpoint == checkpoint.read(folder, 4) and here.quota_bytes == 1 << 20
    assert "does not exist" in away.error
    (tmp_path / "c.toml").write_text("[[model]]")
    with pytest.raises(Invalid, match="c.toml"):
        read_all(tmp_path / "c.toml")


def test_a_folder_that_is_no_model_is_one_clear_line(tmp_path):
    (tmp_path / "empty").mkdir()
    with pytest.raises(Invalid, match="no model that can be served: .*/empty: its folder is empty"):
        write_catalogue([str(tmp_path / "empty")], tmp_path / "c.toml", 2)
    with pytest.raises(Invalid, match="/nowhere: its folder does not exist"):
        write_catalogue(["/nowhere"], tmp_path / "c.toml", 2)


@pytest.mark.parametrize("names", [("a b",), ("m", "m")])
def test_names_that_cannot_be_are_one_clear_line(tmp_path, names):
    folder = checkpoints.write(tmp_path / "m")
    with pytest.raises(Invalid, match="give names as NAME=PATH") as error:
        write_catalogue([f"{name}={folder}" for name in names], tmp_path / "c.toml", 2)
    assert "\n" not in str(error.value)
