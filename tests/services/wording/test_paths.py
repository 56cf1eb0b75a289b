import pytest

from services.wording.paths import without_folders


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("/srv/models/m: no such file", "m: no such file"),
        ("'/srv/models/m/model.safetensors' ends", "'model.safetensors' ends"),
        ("the loader at unix:/run/prism/loader.sock: away", "the loader at loader.sock: away"),
        ("[Errno 2] No such file: '/a/b/c.json' (of /d/e)", "[Errno 2] No such file: 'c.json' (of e)"),
        ("~/models/m is gone", "m is gone"),
        ("path=/opt/x/y", "path=y"),
        ("/srv/models/", "models/"),
    ],
)
def test_path_in_a_text_is_shortened_to_its_last_part(text, told):
    assert without_folders(text) == told


@pytest.mark.parametrize(
    "text",
    [
        "org/model is not active",
        "12 tokens/s, and/or more",
        "<s>a</s> and </think>/x",
        "see https://example.org/a/b/c",
        "the group at 10.0.0.1:7000",
        "weights 1,024 + floor 2,048 / 2",
        "/",
    ],
)
def test_text_without_a_path_stays_as_it_is(text):
    assert without_folders(text) == text
