"""The files that are made of descriptions: those that are shipped, and others that each target's own checks take."""

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import kubernetes_validate
import pytest
import yaml
from typer.testing import CliRunner

from deploy.node.consistency import SERVICES
from deploy.node.description import NodeDescription
from deploy.node.render import HEAD, SHIPPED, render
from deploy.node.targets import TARGETS, described_faults
from loader.catalogue.catalogue import CatalogueFile
from prismctl.__main__ import app
from services.runtime.config import parse

DEPLOY = Path(__file__).resolve().parents[3] / "deploy"
ONE_MODEL = 'models = ["llama-debian"]\nmodels_folder = "/opt/prism/examples/models"\ntargets.ttft_ms = 4000\n'
THREE_MODELS = ONE_MODEL.replace("]", ', "qwen2-python", "qwen3-perl"]')
ON_THE_CPU = '[[devices]]\nname = "cpu:0"\ncapacity_bytes = 28_311_552\n'
LARGE = """
models = ["llama-debian", { path = "large", devices = 2 }]
models_folder = "/srv/models"
devices = ["cuda:0+cuda:1", "cuda:2", "cuda:3"]
http = "0.0.0.0:8080"
grpc = "0.0.0.0:8081"
keys_file = "/etc/prism/keys/keys.toml"
traces = true
kubernetes = { image = "registry/prism:1", gateways = 1, models_claim = "ours" }
compose.image = "registry/prism:1"
systemd.python = "/srv/prism/bin/python"
loader.host_capacity_bytes = 137_438_953_472
gateway.drain_s = 100
scheduler = { drain_s = 40, engines.warm = 2 }
"""


def made(text, to):
    node = NodeDescription.model_validate(tomllib.loads(text)).placed(Path("/home/me"))
    assert described_faults(node, TARGETS[to]) == []
    return render(node, to, {name: (DEPLOY / name).read_text() for name in SHIPPED[to]})


def read(path, text):
    """A configuration file as its service reads it."""
    name = Path(path).stem
    kind = CatalogueFile if name == "catalogue" else SERVICES[re.sub(r"-\d+$", "", name).replace("-", "_")]
    return parse(kind, text, path)


def configs(files):
    return {path: text for path, text in files.items() if path.endswith(".toml")}


def same(files, folder):
    assert {*files} == {str(path.relative_to(folder)) for path in folder.rglob("*.toml")}
    for path, text in files.items():
        assert read(path, text) == read(path, (folder / path).read_text()), path


def test_systemd_files_as_shipped_are_those_of_a_description():
    files = made(ONE_MODEL, "systemd")
    same(configs(files), DEPLOY / "systemd" / "config")
    units = {path: text for path, text in files.items() if path.startswith("units/")}
    assert len(units) == 9
    for path, text in units.items():
        assert text == HEAD + (DEPLOY / "systemd" / path.removeprefix("units/")).read_text()


def test_files_of_a_fleet_as_shipped_are_those_of_a_description():
    files = configs(made(ONE_MODEL + 'nodes = ["node-a", "node-b"]\n', "systemd"))
    assert (
        read("catalogue.toml", files.pop("catalogue.toml")).model[0].path == "/opt/prism/examples/models/llama-debian"
    )
    same(files, DEPLOY / "systemd" / "fleet")


@pytest.mark.parametrize(("device", "more"), [("cpu", ON_THE_CPU), ("cuda", "")])
def test_compose_files_as_shipped_are_those_of_a_description(device, more):
    files = made(THREE_MODELS + more, "compose")
    compose = yaml.safe_load(files.pop("compose.yaml"))
    shipped = DEPLOY / "compose"
    for path, text in files.items():
        assert read(path, text) == read(path, (shipped / path).read_text()), path
    there = [
        path.name for folder in (shipped / "config", shipped / "config" / device) for path in folder.glob("*.toml")
    ]
    assert sorted(Path(path).name for path in files) == sorted(there)

    variables = {"PRISM_DEVICE": device, "PRISM_MODELS": "/opt/prism/examples/models", "PRISM_HTTP": "127.0.0.1:8000"}
    text = (shipped / "compose.yaml").read_text()
    expected = yaml.safe_load(re.sub(r"\$\{(\w+):-[^}]*\}", lambda at: variables.get(at[1], at[0]), text))
    services = {name: each for name, each in expected["services"].items() if "profiles" not in each}
    if device == "cuda":
        for name, each in yaml.safe_load((shipped / "compose.cuda.yaml").read_text())["services"].items():
            services[name] |= each
    for each in services.values():
        del each["build"]
    assert compose["services"] == services and list(compose["services"]) == list(services)
    assert compose["networks"] == expected["networks"]
    assert compose["volumes"] == {name: expected["volumes"][name] for name in ("run", "images", "traffic", "cache")}


def test_manifests_as_shipped_are_those_of_a_description():
    files = made(ONE_MODEL, "kubernetes")
    assert {*files} == {path.name for path in (DEPLOY / "k8s").glob("*.yaml")}
    for name, text in files.items():
        shipped = (DEPLOY / "k8s" / name).read_text()
        for document, expected in zip(yaml.safe_load_all(text), yaml.safe_load_all(shipped), strict=True):
            if document["kind"] == "ConfigMap":
                configs, others = document.pop("data"), expected.pop("data")
                assert {path: read(path, text) for path, text in configs.items()} == {
                    path: read(path, text) for path, text in others.items()
                }
            assert document == expected


def test_manifests_of_several_groups_fit_the_schemas_and_each_other():
    files = made(LARGE, "kubernetes")
    documents = {}
    for text in files.values():
        for document in yaml.safe_load_all(text):
            kubernetes_validate.validate(document, "1.34", strict=True)
            documents[document["kind"], document["metadata"]["name"]] = document
    assert ("PersistentVolumeClaim", "prism-models") not in documents  # there is one
    assert ("PodDisruptionBudget", "prism-gateway") not in documents  # a single gateway may be moved
    pod = documents["DaemonSet", "prism-node"]["spec"]["template"]["spec"]
    opened = [port for each in pod["containers"] for port in each["ports"]]
    assert [port["containerPort"] for port in opened] == [7010, 7011, 7012]
    assert [each["name"] for each in pod["containers"]] == [f"gpu-scheduler-{number}" for number in range(3)]
    for each in pod["containers"]:
        assert each["startupProbe"]["grpc"]["port"] == each["ports"][0]["containerPort"]
        assert each["command"][-1] == f"/etc/prism/{each['name']}.toml"
    service = documents["Service", "prism-node"]["spec"]["ports"]
    assert [(port["name"], port["port"]) for port in service[-3:]] == [(p["name"], p["containerPort"]) for p in opened]
    allowed = [rule["ports"] for rule in documents["NetworkPolicy", "prism-node"]["spec"]["ingress"] if "ports" in rule]
    assert allowed[0] == [{"port": 7010}, {"port": 7011}, {"port": 7012}]
    # 40 s to drain, twice, of each of three groups; 10 s of balloond and of the loader.
    assert pod["terminationGracePeriodSeconds"] == 3 * 85 + 2 * 25
    assert pod["initContainers"][2]["resources"]["requests"]["memory"] == "130Gi"
    claim = documents["ResourceClaimTemplate", "prism-gpus"]["spec"]["spec"]["devices"]["requests"][0]
    assert claim["exactly"]["count"] == 4
    gateway = documents["Deployment", "prism-gateway"]["spec"]["template"]["spec"]
    mounts = {mount["name"]: mount["mountPath"] for mount in gateway["containers"][0]["volumeMounts"]}
    config = read("gateway.toml", documents["ConfigMap", "prism-configuration"]["data"]["gateway.toml"])
    assert config.keys_file == f"{mounts['keys']}/keys.toml"
    assert {"name": "keys", "secret": {"secretName": "prism-keys"}} in gateway["volumes"]
    assert {"name": "models", "persistentVolumeClaim": {"claimName": "ours", "readOnly": True}} in gateway["volumes"]
    for key, document in documents.items():
        if key[0] in ("DaemonSet", "Deployment"):
            assert "prism:cuda" not in str(document), key


@pytest.mark.parametrize("to", TARGETS)
def test_configuration_of_several_groups_passes_the_check_of_the_services(to, tmp_path):
    files = made(LARGE, to)
    if to == "kubernetes":
        documents = [each for text in files.values() for each in yaml.safe_load_all(text)]
        files = {name: text for each in documents if each["kind"] == "ConfigMap" for name, text in each["data"].items()}
    tomls = [*configs(files)]
    for path in files:
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(files[path])
    arguments = ["config", "validate", "--no-folders", *(str(tmp_path / path) for path in tomls)]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    assert len(result.stdout.splitlines()) == len(tomls) == 8
    if to == "systemd":
        wants = "prism-gpu-scheduler@0.service prism-gpu-scheduler@1.service prism-gpu-scheduler@2.service"
        assert f"\nWants={wants}\n" in files["units/prism.target"]
        scheduler, gateway = files["units/prism-gpu-scheduler@.service"], files["units/prism-gateway.service"]
        assert "\nTimeoutStopSec=90s\n" in scheduler and "\nTimeoutStopSec=210s\n" in gateway
        assert "\nExecStart=/srv/prism/bin/python -m gateway " in gateway
        assert "\nWorkingDirectory=/run/prism\n" in gateway
    if to == "compose":
        command = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", "vendor.compose-spec"]
        done = subprocess.run([*command, tmp_path / "compose.yaml"], capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
        services = yaml.safe_load(files["compose.yaml"])["services"]
        assert services["gateway"]["ports"] == ["0.0.0.0:8080:8000", "0.0.0.0:8081:8001"]
        assert services["gateway"]["stop_grace_period"] == "210s"
        assert [*services["placement"]["depends_on"]] == [f"gpu-scheduler-{number}" for number in range(3)]
        assert "/etc/prism/keys" in [volume["source"] for volume in services["gateway"]["volumes"]]
