import tomllib

import pytest

from deploy.local.introduction import introduction, question
from protos import common_pb2, placement_pb2
from tests.deploy.local.test_main import ROOT

CLUSTER = placement_pb2.Cluster(
    groups=[
        placement_pb2.Group(group="cpu:0", capacity_bytes=27 << 20),
        placement_pb2.Group(group="cuda:0", capacity_bytes=77 << 30),
    ]
)


def routes(**errors):
    told = placement_pb2.Routes()
    for name, error in errors.items():
        spec = common_pb2.ModelSpec(name=name, path=f"/models/{name}", weights_bytes=0 if error else 3 << 20)
        residency = common_pb2.ERROR if error else common_pb2.ON_DISK
        told.routes.add(model=spec, residency=residency, error=error)
    return told


def lines(routes, problems=None):
    text = introduction({"gateway": 7}, CLUSTER, routes, problems or {}, "127.0.0.1:8000", "prismctl --state .run")
    return text.splitlines()


def test_introduction_lists_processes_devices_models_and_commands_to_try():
    said = lines(routes(a="", b=""))
    assert "  gateway                     7" in said
    assert "  cpu:0                   27.0 MiB" in said and "  cuda:0                  77.0 GiB" in said
    assert "  a                          3.0 MiB   on disk" in said
    assert any("curl -s http://127.0.0.1:8000/v1/chat/completions" in line for line in said)
    assert "  prismctl --state .run status" in said
    assert any(line.endswith(" http://127.0.0.1:8000/ui") for line in said)


def test_introduction_names_the_folder_of_a_broken_model_once_and_tries_others():
    said = lines(routes(bad="no weights", gone="/models/gone does not exist", good=""))
    starts = {line.split()[0]: line for line in said if line.strip()}
    assert starts["bad"].endswith("   error: /models/bad: no weights")
    assert starts["gone"].endswith("   error: /models/gone does not exist")
    assert sum('"model": "good"' in line for line in said) == 2


@pytest.mark.parametrize(
    ("routes", "why"),
    [
        pytest.param(routes(), "the catalogue has none", id="none"),
        pytest.param(routes(bad="no weights", gone="no folder"), "every model is in error", id="all broken"),
    ],
)
def test_introduction_without_a_model_that_answers_says_so_and_shows_no_requests(routes, why):
    said = lines(routes)
    text = " ".join(said)
    assert f"No model can be asked yet, because {why}" in text and "prismctl --state .run models add " in text
    assert "curl" not in text and "its first request" not in text
    assert "  prismctl --state .run status" in said and said[-1] == "Ctrl-C ends everything."


def test_introduction_says_why_a_group_has_no_warm_engine():
    said = lines(routes(a=""), {"cpu:0": "engines do not start: engine 5 died; its log is x.log"})
    assert "  cpu:0                   27.0 MiB   engines do not start: engine 5 died; its log is x.log" in said


def test_questions_differ_for_every_model_of_the_demonstration():
    listed = tomllib.loads((ROOT / "deploy" / "local" / "catalogue.toml").read_text())["model"]
    assert len({question(model["name"]) for model in listed}) == len(listed)
    assert question("smollm2") == "What is the capital of France?"


def test_commands_to_try_have_a_key_where_one_is_needed():
    text = introduction({}, CLUSTER, routes(a=""), {}, "127.0.0.1:8000", "prismctl", keys=True)
    assert text.count('-H "authorization: Bearer $KEY" \\\n') == 2 and "KEY=" in text
