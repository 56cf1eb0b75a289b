import pytest

from deploy.hub.names import HubModel, of_argument, parse
from services.errors import Invalid


@pytest.mark.parametrize(
    ("text", "model"),
    [
        ("Qwen/Qwen3-0.6B", HubModel("Qwen/Qwen3-0.6B")),
        ("Qwen/Qwen3-0.6B@main", HubModel("Qwen/Qwen3-0.6B", "main")),
        ("hf://org/m@refs/pr/4", HubModel("org/m", "refs/pr/4")),
        ("smollm2", None),
        ("./org/m", None),
        ("../m", None),
        ("/org/m", None),
        ("~/m", None),
        ("a/b/c", None),
        ("org/m@", None),
        ("org/m@a b", None),
    ],
)
def test_text_names_a_model_of_the_hub_only_as_org_and_name(text, model):
    assert parse(text) == model


@pytest.mark.parametrize(
    ("text", "word"), [("s3://bucket/m", "aws s3 sync"), ("https://huggingface.co/o/m", "ORG/NAME")]
)
def test_address_of_another_kind_is_refused_by_its_scheme(text, word):
    with pytest.raises(Invalid, match=word):
        of_argument(f"m={text}")


def test_argument_names_a_model_of_the_hub_unless_there_is_such_a_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "org" / "here").mkdir(parents=True)
    assert of_argument("org/here") is None and of_argument("mine=org/here") is None
    assert of_argument("org/m@v1") == ("org/m", HubModel("org/m", "v1"))
    assert of_argument("mine=org/m") == ("mine", HubModel("org/m"))
    assert of_argument("team/mine=org/m") == ("team/mine", HubModel("org/m"))
    assert of_argument("team/mine=/models/m") is None
