import pytest

from deploy.local.models import named, write_catalogue
from loader import catalogue
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
