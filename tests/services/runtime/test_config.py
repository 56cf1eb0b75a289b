import pytest
from pydantic import Field

from services.runtime.config import Config, ConfigSection, load, parse, read


class Inner(ConfigSection):
    REMOVED = {"colour_s": "it is always red", "extras.shape": "it is always round"}

    size: int = Field(gt=0)
    extras: dict[str, str] = {}


class Example(Config):
    inner: Inner
    names: list[str] = []


GOOD = 'name = "x"\nlisten = "unix:/s"\n[inner]\nsize = 3\n'


def test_config_file_is_read_with_its_defaults():
    config = parse(Example, GOOD, "f.toml")
    assert (config.inner.size, config.log_level, config.names) == (3, "info", [])


@pytest.mark.parametrize(
    ("text", "names"),
    [
        (GOOD.replace("size = 3", "size = 3\ncolour = 1"), ["f.toml", "inner.colour", "unknown key"]),
        (GOOD.replace("size = 3", "sizes = 3"), ["inner.sizes: unknown key; the nearest one is size"]),
        (GOOD.replace("size = 3", "size = 0"), ["f.toml", "inner.size", "greater than 0"]),
        (GOOD.replace("size = 3", ""), ["f.toml", "inner.size"]),
        ("name = ", ["f.toml", "not TOML"]),
    ],
)
def test_config_file_that_is_bad_is_refused_in_one_line_that_names_the_key(text, names):
    with pytest.raises(ValueError) as caught:
        parse(Example, text, "f.toml")
    message = str(caught.value)
    assert "\n" not in message
    for name in names:
        assert name in message


def test_config_setting_that_was_removed_is_a_warning_with_what_holds_now(tmp_path, capsys):
    path = tmp_path / "f.toml"
    path.write_text(GOOD + "colour_s = 1\n")
    assert load(Example, path).inner.size == 3
    said = f"{path}: inner.colour_s: it is not a setting any more and has no effect: it is always red\n"
    assert capsys.readouterr().err == said


def test_config_name_that_was_removed_from_a_table_of_any_names_is_a_warning_and_the_others_stay(tmp_path, capsys):
    path = tmp_path / "f.toml"
    path.write_text(GOOD + '[inner.extras]\nshape = "square"\nweight = "1"\n')
    assert load(Example, path).inner.extras == {"weight": "1"}
    said = f"{path}: inner.extras.shape: it is not a setting any more and has no effect: it is always round\n"
    assert capsys.readouterr().err == said


def test_config_file_that_is_missing_ends_the_process_in_one_line(tmp_path):
    with pytest.raises(SystemExit, match="nothing.toml: No such file"):
        load(Example, tmp_path / "nothing.toml")


def test_config_cannot_be_changed_after_it_was_read():
    config = parse(Example, GOOD, "f.toml")
    with pytest.raises(ValueError):
        config.name = "other"


def test_config_variables_are_taken_from_the_environment_when_a_file_is_read(tmp_path, monkeypatch):
    monkeypatch.setenv("NODE_NAME", 'n"1')
    path = tmp_path / "f.toml"
    path.write_text(GOOD.replace('name = "x"', 'name = "${NODE_NAME}/x"\nnames = ["${NODE_NAME}", "$5 ${lower} {}"]'))
    config = read(Example, path)
    assert (config.name, config.names) == ('n"1/x', ['n"1', "$5 ${lower} {}"])
    assert parse(Example, path.read_text(), "f.toml").name == "${NODE_NAME}/x", "elsewhere it is not known"


def test_config_variable_alone_in_its_string_may_be_a_number_or_a_boolean():
    class Settings(ConfigSection):
        port: int
        share: float
        on: bool
        name: str

    text = 'port = "${A}"\nshare = "${B}"\non = "${C}"\nname = "${A}"'
    values = {"A": "8000", "B": "0.5", "C": "true"}
    assert parse(Settings, text, "f.toml", values) == Settings(port=8000, share=0.5, on=True, name="8000")
    with pytest.raises(ValueError, match=r"^f\.toml: port: it should be a whole number$"):
        parse(Settings, text, "f.toml", values | {"A": "many"})
    with pytest.raises(ValueError, match=r"^f\.toml: port: it should be a whole number$"):
        parse(Settings, text.replace('"${A}"', '"8${B}"', 1), "f.toml", values)


def test_config_variable_that_is_not_set_is_refused_by_name(tmp_path, monkeypatch):
    monkeypatch.delenv("NODE_NAME", raising=False)
    path = tmp_path / "f.toml"
    path.write_text(GOOD.replace('name = "x"', 'name = "${NODE_NAME}"'))
    with pytest.raises(ValueError, match=r"f\.toml: NODE_NAME is not set in the environment"):
        read(Example, path)


@pytest.mark.parametrize(
    ("content", "why"), [(b'name = "\xff"', "not text"), (b"name = " + b"[" * 5000, "nested too deeply")]
)
def test_config_file_that_is_no_text_or_too_deep_is_refused_by_name_in_one_line(tmp_path, content, why):
    path = tmp_path / "c.toml"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=why) as refused:
        read(Config, path)
    assert str(refused.value).startswith(str(path)) and "\n" not in str(refused.value)
