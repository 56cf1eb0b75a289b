"""The compose file: well-formed, nothing in it that is not there, and all of its services as it names them."""

import contextlib
import graphlib
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import yaml

from balloond.config import BalloondConfig
from balloond.policy import capacity
from gateway.config import GatewayConfig
from gpu_scheduler.config import GpuSchedulerConfig
from loader.catalogue import catalogue
from loader.config import LoaderConfig
from placement.config import PlacementConfig
from services.runtime.config import parse
from tests.deploy.compose.composed import FOLDER, ROOT, Container, read, seconds
from tests.deploy.system import complete

BIN = Path(sys.executable).parent
KINDS = {
    "balloond": BalloondConfig,
    "loader": LoaderConfig,
    "gpu_scheduler": GpuSchedulerConfig,
    "placement": PlacementConfig,
    "gateway": GatewayConfig,
}
DOCKERFILES = ["Dockerfile.cpu", "Dockerfile.cuda"]
COMPOSE = read({})
OURS = {name: service for name, service in COMPOSE["services"].items() if "build" in service}


def configurations(device):
    """(service, file, configuration) of each service that has one."""
    for name, service in read({"PRISM_DEVICE": device})["services"].items():
        if "--config" in service.get("command", ()):
            _, _, module, _, path = service["command"]
            path = FOLDER / "config" / Path(path).relative_to("/etc/prism")
            yield name, service, parse(KINDS[module], path.read_text(), str(path))


@pytest.mark.parametrize("name", ["compose.yaml", "compose.cuda.yaml"])
def test_compose_file_fits_the_specification(name):
    command = [BIN / "check-jsonschema", "--builtin-schema", "vendor.compose-spec", FOLDER / name]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("name", ["keeper", "balloond"])
def test_compose_services_that_hold_extents_may_open_a_descriptor_for_each_on_eight_large_gpus(name):
    limit = read({"PRISM_DEVICE": "cuda"})["services"][name]["ulimits"]["nofile"]
    capacity.check_descriptors(name, [(192 << 30, capacity.KV_EXTENT)] * 8, limit)


def test_compose_file_refers_only_to_what_exists():
    services = COMPOSE["services"]
    for name, service in services.items():
        assert set(service.get("networks", ())) <= set(COMPOSE["networks"]), name
        for volume in service.get("volumes", ()):
            if volume["type"] == "volume":
                assert volume["source"] in COMPOSE["volumes"], name
            else:
                assert (FOLDER / volume["source"]).exists(), f"{name}: {volume['source']}"
                # Where it is missing all the same, docker says so and starts nothing.
                assert volume["bind"] == {"create_host_path": False}, name
        for other, how in service.get("depends_on", {}).items():
            assert how["condition"] != "service_healthy" or "healthcheck" in services[other], f"{name}: {other}"
        assert service.get("pid", "service:pids").removeprefix("service:") in services, name
        build = service.get("build", {"context": ".", "dockerfile": "compose.yaml"})
        assert (FOLDER / build["context"] / build["dockerfile"]).is_file() or name not in OURS
    settings = dict(line.split("=", 1) for line in (FOLDER / "cuda.env").read_text().splitlines())
    assert all((FOLDER / name).is_file() for name in settings["COMPOSE_FILE"].split(":"))
    assert set(read(settings, "compose.cuda.yaml")["services"]) <= set(services)


def test_services_of_the_node_share_their_pid_namespace():
    sharing = {name for name, service in OURS.items() if service.get("pid") == "service:pids"}
    assert sharing == {"keeper", "balloond", "loader", "gpu-scheduler-0"}
    # And process 1, whose end would be theirs, is none of them.
    assert "pid" not in OURS["pids"] and OURS["pids"]["init"]


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_compose_configurations_are_valid_and_their_stop_leaves_time_to_drain(device):
    found = list(configurations(device))
    assert {service["command"][2] for _, service, _ in found} == set(KINDS)
    for name, service, config in found:
        assert config.name == name
        assert seconds(service["stop_grace_period"]) >= 2 * config.drain_s + 10, name


def test_prometheus_targets_are_the_metrics_addresses_of_the_services():
    asked = yaml.safe_load((FOLDER / "monitoring" / "prometheus.yaml").read_text())
    (targets,) = [group["targets"] for job in asked["scrape_configs"] for group in job["static_configs"]]
    there = {
        f"{name}:{(config.metrics or config.http).rpartition(':')[2]}" for name, _, config in configurations("cuda")
    }
    assert set(targets) == there
    for target in targets:
        assert "metrics" in OURS[target.partition(":")[0]]["networks"]


@pytest.mark.parametrize("name", DOCKERFILES)
def test_dockerfiles_pass_the_linter_and_copy_what_exists(name):
    done = subprocess.run([BIN / "hadolint", FOLDER / name], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
    copied = re.findall(r"^COPY (?!--from)(\S+) ", (FOLDER / name).read_text(), re.MULTILINE)
    assert copied and all((ROOT / source).exists() for source in copied)
    named = re.findall(r"requirements/\S+\.txt", (FOLDER / name).read_text())
    assert len(named) == 4 and all((ROOT / path.rstrip('")')).is_file() for path in named)


@pytest.mark.parametrize("name", DOCKERFILES)
def test_container_image_has_all_of_the_tree_that_services_need(name, tmp_path):
    ignored = (FOLDER / f"{name}.dockerignore").read_text().split()
    left_out = shutil.ignore_patterns(*(pattern.removeprefix("**/").removeprefix("protos/") for pattern in ignored))
    shutil.copytree(ROOT, tmp_path / "prism", ignore=left_out)
    (generate,) = re.findall(r"-m grpc_tools\.protoc [^\\\n]*", (FOLDER / name).read_text())
    modules = [f"{module}.__main__" for module in KINDS] + [
        "balloond.keeper",
        "prismctl.__main__",
        "deploy.healthy",
    ]
    command = (
        f"{sys.executable} {generate}&& {sys.executable} -c 'import {', '.join(modules)}; print(balloond.__file__)'"
    )
    done = subprocess.run(["sh", "-c", command], cwd=tmp_path / "prism", capture_output=True, text=True)
    assert (done.returncode, done.stdout.strip()) == (0, f"{tmp_path}/prism/balloond/__init__.py"), done.stderr


@pytest.fixture
def folder():
    # Unix socket paths are short; pytest's folders are not.
    with tempfile.TemporaryDirectory(prefix="prism-") as name:
        yield Path(name)


async def test_compose_services_run_as_named_and_serve(folder):
    order = list(graphlib.TopologicalSorter({n: s.get("depends_on", ()) for n, s in OURS.items()}).static_order())
    async with contextlib.AsyncExitStack() as stack:
        containers = {}
        for name in order:
            containers[name] = Container(name, OURS[name], folder)
            await containers[name].start()
            stack.push_async_callback(containers[name].close)
        http = containers["gateway"].ports["0.0.0.0:8000"]
        for listed in catalogue.read(folder / "loader" / "catalogue.toml"):
            assert await complete(http, listed.name)
        for name in reversed(order):
            if name != "pids":  # tini's to end
                assert await containers[name].stop() == 0, containers[name].said()


async def test_compose_service_of_an_unconfigured_device_ends_with_one_line(folder):
    service = read({"PRISM_DEVICE": "tpu"})["services"]["balloond"]
    container = Container("balloond", service, folder)
    assert await (await container.run(service["command"])).wait() == 1
    assert container.said() == f"{folder}/balloond/tpu/balloond.toml: No such file or directory\n"
