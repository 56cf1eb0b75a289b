import tomllib

from deploy.local.questions import question
from tests.deploy.local.test_main import ROOT


def test_questions_differ_for_every_model_of_the_demonstration():
    listed = tomllib.loads((ROOT / "deploy" / "local" / "catalogue.toml").read_text())["model"]
    assert len({question(model["name"]) for model in listed}) == len(listed)
    assert question("smollm2") == "What is the capital of France?"
