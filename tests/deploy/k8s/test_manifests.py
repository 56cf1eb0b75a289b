"""The manifests: as Kubernetes' schemas allow, nothing in them that is not there, and their commands as processes."""

import contextlib
import re
import tempfile
import tomllib
from pathlib import Path

import kubernetes_validate
import pytest
import yaml

from balloond.config import BalloondConfig
from gateway.config import GatewayConfig
from gpu_scheduler.config import GpuSchedulerConfig
from loader.catalogue import catalogue
from loader.config import LoaderConfig
from placement.cluster import names
from placement.config import PlacementConfig
from services.runtime.config import parse
from testing.ports import free_port
from testing.systems.local import FOLDER as MODELS
from tests.deploy.compose.composed import ROOT, Container
from tests.deploy.system import complete

MANIFESTS = [
    document
    for path in sorted((ROOT / "deploy" / "k8s").glob("*.yaml"))
    for document in yaml.safe_load_all(path.read_text())
]
KINDS = {
    "balloond": BalloondConfig,
    "loader": LoaderConfig,
    "gpu_scheduler": GpuSchedulerConfig,
    "placement": PlacementConfig,
    "gateway": GatewayConfig,
}


def kind(name):
    return {document["metadata"]["name"]: document for document in MANIFESTS if document["kind"] == name}


PODS = {name: document["spec"]["template"] for name, document in (kind("DaemonSet") | kind("Deployment")).items()}
FILES = kind("ConfigMap")["prism-configuration"]["data"]


def containers(pod):
    """In the order of their start."""
    return [*pod["spec"].get("initContainers", ()), *pod["spec"]["containers"]]


def environment(container, node):
    """As a container on that node has it."""
    return {
        variable["name"]: variable["value"] if "value" in variable else {"spec.nodeName": node}[field_path(variable)]
        for variable in container.get("env", ())
    }


def field_path(variable):
    return variable["valueFrom"]["fieldRef"]["fieldPath"]


# The oldest with what is used, and the newest.
@pytest.mark.parametrize("version", ["1.34", "1.37"])
def test_manifests_fit_the_schemas_of_kubernetes(version):
    assert len(MANIFESTS) == 14
    for document in MANIFESTS:
        kubernetes_validate.validate(document, version, strict=True)


def test_manifest_with_a_misspelled_key_is_found():
    broken = yaml.safe_load(yaml.safe_dump(kind("DaemonSet")["prism-node"]))
    broken["spec"]["template"]["spec"]["containers"][0]["livenessProb"] = {}
    with pytest.raises(kubernetes_validate.ValidationError, match="livenessProb"):
        kubernetes_validate.validate(broken, "1.37", strict=True)


@pytest.mark.parametrize("name", PODS)
def test_pods_refer_only_to_what_exists(name):
    pod = PODS[name]
    assert (
        pod["metadata"]["labels"] == (kind("DaemonSet") | kind("Deployment"))[name]["spec"]["selector"]["matchLabels"]
    )
    volumes = {volume["name"]: volume for volume in pod["spec"]["volumes"]}
    claims = {claim["name"]: claim["resourceClaimTemplateName"] for claim in pod["spec"].get("resourceClaims", ())}
    assert set(claims.values()) <= set(kind("ResourceClaimTemplate"))
    for container in containers(pod):
        assert {mount["name"] for mount in container["volumeMounts"]} <= set(volumes)
        assert {claim["name"] for claim in container["resources"].get("claims", ())} <= set(claims)
        ports = {port["containerPort"] for port in container.get("ports", ())}
        for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
            if "grpc" in container.get(probe, {}):
                assert container[probe]["grpc"]["port"] in ports, f"{container['name']}: {probe}"
        # A part of it is written to only where a volume says so.
        assert container["securityContext"]["readOnlyRootFilesystem"]
    for volume in volumes.values():
        if "configMap" in volume:
            assert volume["configMap"]["name"] in kind("ConfigMap")
        if "persistentVolumeClaim" in volume:
            assert volume["persistentVolumeClaim"]["claimName"] in kind("PersistentVolumeClaim")


def test_kubernetes_services_lead_to_ports_that_a_pod_opens():
    for name, service in kind("Service").items():
        (pod,) = [pod for pod in PODS.values() if pod["metadata"]["labels"] == service["spec"]["selector"]]
        opened = {(port["name"], port["containerPort"]) for c in containers(pod) for port in c.get("ports", ())}
        assert {(port["name"], port["port"]) for port in service["spec"]["ports"]} <= opened, name


def test_manifests_catalogue_is_valid(tmp_path):
    file = tmp_path / "catalogue.toml"
    file.write_text(kind("ConfigMap")["prism-catalogue"]["data"][file.name])
    assert [model.path for model in catalogue.read(file)] == ["/models/llama-debian"]


def test_manifests_configurations_are_valid_and_a_stop_leaves_time_to_drain():
    used = set()
    for pod in PODS.values():
        needed = 0.0
        for container in containers(pod):
            _, _, module, option, path = container["command"]
            assert option in ("--config", "--socket")
            if option == "--config":
                name = Path(path).name
                config = parse(KINDS[module], FILES[name], name)
                assert config.name == name.removesuffix(".toml")
                needed += 2 * config.drain_s + 5
                used.add(name)
        assert pod["spec"]["terminationGracePeriodSeconds"] >= needed
    assert used == set(FILES)


def configured(module, node):
    """What the container with that service on that node is configured to be."""
    (container,) = [each for each in containers(PODS["prism-node"]) if each["command"][2] == module]
    name = Path(container["command"][-1]).name
    return parse(KINDS[module], FILES[name], name, environment(container, node))


def test_node_names_differ_and_placement_finds_all_nodes_by_the_name_of_the_service():
    found = {node: [configured(module, node) for module in ("balloond", "loader", "gpu_scheduler")] for node in "ab"}
    for node, (balloond, _, group) in found.items():
        assert (balloond.node, group.group) == (node, f"{node}/cuda:0")
    service = kind("Service")["prism-node"]["spec"]
    assert service["clusterIP"] == "None", "its name has to be the pods' addresses"
    placement = parse(PlacementConfig, FILES["placement.toml"], "placement.toml")
    for address, config in zip(placement.balloond + placement.loaders + placement.groups, found["a"], strict=True):
        assert names.parse(address) == ("prism-node", int(config.listen.removeprefix("0.0.0.0:")))


def test_node_claims_as_many_gpus_as_are_configured():
    (request,) = kind("ResourceClaimTemplate")["prism-gpus"]["spec"]["spec"]["devices"]["requests"]
    assert request["exactly"]["count"] == len(tomllib.loads(FILES["balloond.toml"])["devices"])


def test_node_services_share_a_pid_namespace_and_the_keeper_is_first():
    node = PODS["prism-node"]["spec"]
    assert node["shareProcessNamespace"]
    assert [container["name"] for container in node["initContainers"]] == ["keeper", "balloond", "loader"]
    for container in node["initContainers"]:
        assert container["restartPolicy"] == "Always" and "startupProbe" in container


def on_the_cpu(text):
    """A configuration for a machine without a GPU."""
    text = text.replace('name = "cuda:0"', 'name = "cpu:0"\ncapacity_bytes = 33554432').replace("cuda:0", "cpu:0")
    text = text.replace("host_capacity_bytes = 68719476736", "host_capacity_bytes = 268435456")
    return re.sub(r"^(device_dtype_bytes|kv_extent_bytes|engine_quota_bytes|copy_devices) .*\n", "", text, flags=re.M)


async def test_containers_of_the_manifests_run_with_their_commands_and_configuration_and_serve():
    async with contextlib.AsyncExitStack() as stack:
        # Unix socket paths are short; pytest's folders are not.
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="prism-")))
        for name, config_map in kind("ConfigMap").items():
            (folder / name).mkdir()
            for file, text in config_map["data"].items():
                (folder / name / file).write_text(on_the_cpu(text).replace("/models", str(MODELS)))
        # All share this machine's ports: an address listened on, by pod and by the name of the service.
        texts = "".join(FILES.values())
        addresses = {found: f"127.0.0.1:{free_port()}" for found in re.findall(r'= "0\.0\.0\.0:(\d+)"', texts)}
        here = {f"{host}:{port}": address for port, address in addresses.items() for host in
                ("0.0.0.0", "127.0.0.1", "prism-node", "prism-placement")}  # fmt: skip
        started = []
        for pod in ("prism-node", "prism-placement", "prism-gateway"):
            sources = {volume["name"]: volume for volume in PODS[pod]["spec"]["volumes"]}
            for container in containers(PODS[pod]):
                service = {"command": container["command"], "stop_grace_period": "60s", "volumes": []}
                service["environment"] = environment(container, node="node-1")
                for mount in container["volumeMounts"]:
                    config_map = sources[mount["name"]].get("configMap")
                    service["volumes"].append(
                        {"type": "bind", "source": folder / config_map["name"], "target": mount["mountPath"]}
                        if config_map
                        else {"type": "volume", "source": f"{pod}-{mount['name']}", "target": mount["mountPath"]}
                    )
                probe = container["startupProbe"]
                asked = f"127.0.0.1:{probe['grpc']['port']}" if "grpc" in probe else None
                command = ["python", "-m", "deploy.healthy", asked] if asked else probe["exec"]["command"]
                service["healthcheck"] = {"test": ["CMD", *command]}
                started.append(Container(container["name"], service, folder, here))
                await started[-1].start()
                stack.push_async_callback(started[-1].close)
        assert await complete(here["0.0.0.0:8000"], "llama-debian")
        for container in reversed(started):
            assert await container.stop() == 0, container.said()
