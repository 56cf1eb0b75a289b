"""The operator's file of models."""

import json

import pytest

from loader.catalogue import catalogue


def write(folder, text):
    path = folder / "catalogue.toml"
    path.write_text(text)
    return path


def test_catalogue_models_are_read_with_paths_relative_to_the_file(tmp_path):
    path = write(
        tmp_path,
        """
        [[model]]
        name = "org/one"
        path = "models/../models/one"
        ttft_ms = 2000
        tpot_ms = 100
        pinned = true
        engine = "echo"
        quota_bytes = 7
        context_tokens = 10
        floor_tokens = 20

        [[model]]
        name = "two"
        path = "/somewhere/two"
        """,
    )
    one, two = catalogue.read(path)
    assert one.path == str(tmp_path / "models" / "one")
    assert (one.name, one.ttft_ms, one.tpot_ms, one.pinned, one.engine) == ("org/one", 2000, 100, True, "echo")
    assert (one.quota_bytes, one.context_tokens, one.floor_tokens) == (7, 10, 20)
    assert two.path == "/somewhere/two"
    assert (two.ttft_ms, two.pinned, two.engine, two.quota_bytes) == (0, False, "", None)


def test_empty_catalogue_file_lists_no_models(tmp_path):
    assert catalogue.read(write(tmp_path, "")) == ()


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        pytest.param("model = 3", "model: it should be a list", id="no list"),
        pytest.param("models = []", "models: unknown key", id="unknown key of the file"),
        pytest.param('[[model]]\nname = "a"', "model.0.path: it is required, and is not there", id="no path"),
        pytest.param('[[model]]\nname = "a"\npath = ""', "model.0.path", id="empty path"),
        pytest.param('[[model]]\nname = "a b"\npath = "x"', "model.0.name", id="a name that no URL can carry"),
        pytest.param('[[model]]\nname = "a"\npath = "x"\nttft = 3', "model.0.ttft: unknown key", id="unknown key"),
        pytest.param('[[model]]\nname = "a"\npath = "x"\nttft_ms = -3', "model.0.ttft_ms", id="negative target"),
        pytest.param(
            '[[model]]\nname = "a"\npath = "x"\nfloor_tokens = 2147483648', "floor_tokens", id="beyond 64 bits"
        ),
        pytest.param(
            '[[model]]\nname = "a"\npath = "x"\npinned = "no"\nengine = "x"', "model.0.engine", id="no engine"
        ),
        pytest.param(
            '[[model]]\nname = "a"\npath = "x"\ncontext_tokens = 9\nfloor_tokens = 8',
            "floor_tokens 8 is less than one request of context_tokens 9",
            id="a floor that holds no request",
        ),
        pytest.param('[[model]]\nname = "a"\npath = "x"\naliases = ["b c"]', "model.0.aliases.0: 'b c'", id="alias"),
        pytest.param(
            '[[model]]\nname = "a"\npath = "x"\naliases = ["b"]\n[[model]]\nname = "b"\npath = "x"',
            "the alias 'b' of 'a' is the name of a model",
            id="an alias that is a name",
        ),
        pytest.param(
            '[[model]]\nname = "a"\npath = "x"\naliases = ["c"]\n[[model]]\nname = "b"\npath = "x"\naliases = ["c"]',
            "the alias 'c' of 'b' is given twice: 'a' has it",
            id="an alias of two models",
        ),
        pytest.param(
            '[[model]]\nname = "a"\npath = "x"\n[[model]]\nname = "a"\npath = "y"',
            "'a' is given twice",
            id="name twice",
        ),
        pytest.param("[[model", "not TOML", id="not TOML"),
    ],
)
def test_invalid_catalogue_file_is_refused_with_one_line_that_names_the_key(tmp_path, text, reason):
    path = write(tmp_path, text)
    with pytest.raises(ValueError) as refused:
        catalogue.read(path)
    assert str(path) in str(refused.value) and reason in str(refused.value)
    assert "\n" not in str(refused.value)


def test_missing_catalogue_file_is_named(tmp_path):
    with pytest.raises(ValueError, match="none.toml: No such file"):
        catalogue.read(tmp_path / "none.toml")


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("a//b", "nothing before, after or between slashes"),
        ("a/", "nothing before, after or between slashes"),
        ("/a", "nothing before, after or between slashes"),
        ("a/../b", "'.' and '..' are no parts of one"),
        ("a/.", "'.' and '..' are no parts of one"),
        ("a b", "letters, digits and ._:/@+- after a letter or a digit"),
        ("", "letters, digits and ._:/@+- after a letter or a digit"),
        ("a\n", "letters, digits and ._:/@+- after a letter or a digit"),
        ("a" * 201, "more than 200 characters"),
    ],
)
def test_model_name_that_not_every_client_can_send_is_refused(tmp_path, name, reason):
    path = write(tmp_path, f'[[model]]\nname = {json.dumps(name)}\npath = "x"')
    with pytest.raises(ValueError) as refused:
        catalogue.read(path)
    assert "model.0.name: " in str(refused.value) and str(refused.value).endswith(reason)


@pytest.mark.parametrize("name", ["a", "org/some-model", "org/a.b:7b@v1+x", "a/b/c", "a/.b/..c", "a" * 200])
def test_model_names_that_any_client_can_send_are_accepted(tmp_path, name):
    (listed,) = catalogue.read(write(tmp_path, f'[[model]]\nname = "{name}"\npath = "x"'))
    assert listed.name == name
