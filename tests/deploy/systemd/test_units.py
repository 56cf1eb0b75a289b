"""The units: what systemd says of them, and all of them under systemd itself."""

import configparser
import shutil
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path

import pytest
import tomli_w

from balloond.config import BalloondConfig
from balloond.policy import capacity
from deploy.node.consistency import ConfigFile, disagreements
from gateway.config import GatewayConfig
from gpu_scheduler.config import GpuSchedulerConfig
from loader.catalogue import catalogue
from loader.config import LoaderConfig
from placement.config import PlacementConfig
from services.runtime.config import parse
from testing.ports import free_port
from tests.deploy.system import complete, ledger
from tests.deploy.systemd import machine as machines

FOLDER = machines.ROOT / "deploy" / "systemd"
KINDS = {
    "balloond": BalloondConfig,
    "loader": LoaderConfig,
    "gpu-scheduler-0": GpuSchedulerConfig,
    "placement": PlacementConfig,
    "gateway": GatewayConfig,
}
SERVICES = ("keeper", "balloond", "loader", "gpu-scheduler@0", "placement", "gateway")
MODEL = "llama-debian"


def unit(name):
    read = configparser.RawConfigParser(strict=False)
    read.optionxform = str
    read.read(FOLDER / f"prism-{name.replace('@0', '@')}.service")
    return read


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd-analyze is not installed")
def test_systemd_units_pass_systemd_analyze(tmp_path):
    paths = []
    for path in [*FOLDER.glob("*.service"), *FOLDER.glob("*.target")]:
        # Instances of a template are what can be looked at.
        paths.append(tmp_path / path.name.replace("@.", "@0."))
        paths[-1].write_text(path.read_text().replace("/opt/prism/.venv/bin/python", sys.executable))
    assert len(paths) == 7
    # Two gateways on one socket, installed as docs/operate/upgrades.md says.
    two = FOLDER / "two-gateways"
    paths += [tmp_path / "prism-gateway.socket", tmp_path / "prism-gateway@1.service"]
    shutil.copy(two / "prism-gateway.socket", tmp_path)
    shutil.copy(tmp_path / "prism-gateway.service", tmp_path / "prism-gateway@1.service")
    (tmp_path / "prism-gateway@1.service.d").mkdir()
    shutil.copy(two / "sockets.conf", tmp_path / "prism-gateway@1.service.d")
    done = subprocess.run(["systemd-analyze", "verify", "--man=no", *paths], capture_output=True, text=True)
    assert (done.returncode, [line for line in done.stderr.splitlines() if "prism" in line]) == (0, [])


@pytest.mark.parametrize("name", KINDS)
def test_systemd_configuration_files_are_those_that_units_name_and_are_valid(name):
    path = FOLDER / "config" / f"{name}.toml"
    config = parse(KINDS[name], path.read_text(), str(path))
    assert config.name == name
    (service,) = [s for s in SERVICES if s.replace("@", "-") == name]
    command = unit(service)["Service"]["ExecStart"].replace("%i", "0")
    assert command.endswith(f" -m {name.removesuffix('-0').replace('-', '_')} --config /etc/prism/{name}.toml")
    # Drains, then what stops after them.
    assert int(unit(service)["Service"]["TimeoutStopSec"].removesuffix("s")) >= 2 * config.drain_s + 10


@pytest.mark.parametrize("name", ["keeper", "balloond"])
def test_systemd_units_that_hold_extents_may_open_a_descriptor_for_each_on_eight_large_gpus(name):
    limit = int(unit(name)["Service"]["LimitNOFILE"])
    capacity.check_descriptors(name, [(192 << 30, capacity.KV_EXTENT)] * 8, limit)


def test_gateways_of_one_host_differ_in_their_instance_and_share_a_socket():
    text = (FOLDER / "two-gateways" / "gateway.toml").read_text()
    one, other = (parse(GatewayConfig, text, "gateway", {"INSTANCE": number}) for number in "12")
    assert one.listen != other.listen and one.name != other.name and one.http == other.http
    assert f"\nListenStream={one.http}\n" in (FOLDER / "two-gateways" / "prism-gateway.socket").read_text()
    assert "\nEnvironment=INSTANCE=%i\n" in (FOLDER / "prism-gateway.service").read_text()


def test_fleet_files_fit_any_node_and_placement_reaches_what_they_listen_on():
    texts = {path.stem: path.read_text() for path in (FOLDER / "fleet").glob("*.toml")}
    assert set(texts) == {"balloond", "loader", "gpu-scheduler-0", "placement", "gateway"}
    for service in ("balloond", "gpu-scheduler@"):
        assert "\nEnvironment=NODE_NAME=%H\n" in (FOLDER / f"prism-{service}.service").read_text()
    read = {name: parse(KINDS[name], text, name, {"NODE_NAME": "node-a"}) for name, text in texts.items()}
    group, placement = read["gpu-scheduler-0"], read["placement"]
    assert (read["balloond"].node, group.group) == ("node-a", "node-a/cuda:0")
    assert (group.balloond, group.loader) == ("127.0.0.1:7001", "127.0.0.1:7002")
    assert not list(disagreements([ConfigFile(name, config) for name, config in read.items()]))
    assert read["placement"].listen.removeprefix("0.0.0.0") == read["gateway"].placement.removeprefix("127.0.0.1")
    for name, listed in (("balloond", "balloond"), ("loader", "loaders"), ("gpu-scheduler-0", "groups")):
        port = read[name].listen.removeprefix("0.0.0.0:")
        assert placement.members[listed] == [f"node-a:{port}", f"node-b:{port}"]


def test_systemd_catalogue_is_valid():
    assert [model.name for model in catalogue.read(FOLDER / "config" / "catalogue.toml")] == [MODEL]


def on_the_cpu(http):
    """The shipped configuration, for a machine without a GPU."""
    files = {path.stem: tomllib.loads(path.read_text()) for path in (FOLDER / "config").glob("*.toml")}
    files["balloond"]["devices"] = [{"name": "cpu:0", "capacity_bytes": 32 << 20}]
    files["gpu-scheduler-0"] |= {"group": "cpu:0", "devices": ["cpu:0"], "engines": {"kind": "echo"}}
    for key in ("device_dtype_bytes", "kv_extent_bytes", "engine_quota_bytes", "copy_devices"):
        del files["loader"][key]
    files["loader"]["host_capacity_bytes"] = 256 << 20
    files["gateway"] |= {"http": http, "listen": f"127.0.0.1:{free_port()}"}
    for config in files.values():
        config.pop("metrics", None)
    texts = {f"{name}.toml": tomli_w.dumps(config) for name, config in files.items() if name != "catalogue"}
    return texts | {"catalogue.toml": (FOLDER / "config" / "catalogue.toml").read_text()}


@pytest.fixture
def machine():
    if why := machines.missing():
        pytest.skip(why)
    http = f"127.0.0.1:{free_port()}"
    # Where the interpreter is in a home, homes must be seen.
    home = "ProtectHome=no\n" if sys.base_prefix.startswith(("/root/", "/home/")) else ""
    with tempfile.TemporaryDirectory(prefix="prism-") as folder:
        logs = f"StandardOutput=append:{folder}/console\nStandardError=inherit\n"
        drop_in = f"[Service]\nWatchdogSec=5s\n{home}{logs}"
        with machines.machine(Path(folder), on_the_cpu(http), drop_in) as running:
            running.http = http
            try:
                yield running
            except BaseException:
                print((Path(folder) / "console").read_text()[-6000:])
                raise


def pids(machine):
    return {name: machine.shows(f"prism-{name}", "MainPID") for name in SERVICES}


async def test_services_under_systemd_start_restart_and_stop_and_the_keeper_outlives_restarts(machine):
    machine.systemctl("start", "prism.target")
    # One that nobody configured.
    machine.systemctl("start", "--no-block", "prism-gpu-scheduler@1")
    for name in SERVICES:
        shown = [machine.shows(f"prism-{name}", key) for key in ("ActiveState", "NRestarts")]
        assert shown == ["active", "0"], machine.systemctl("status", f"prism-{name}", check=False)
        assert machine.shows(f"prism-{name}", "StatusText").startswith("serving on ")
    # Who serves the network may ask placement and gpu_schedulers, and nobody else.
    for_group = {path.name for path in machine.run.glob("*.sock*") if path.is_socket() and path.stat().st_mode & 0o020}
    assert for_group == {"gpu-scheduler-0.sock", "gpu-scheduler-0.sock.stream", "placement.sock"}
    text = await complete(machine.http, MODEL)
    balloond = f"unix:{machine.run}/balloond.sock"
    before, first = await ledger(balloond), pids(machine)
    assert before

    # Killed: started again with what the keeper has.
    machine.systemctl("kill", "--signal=KILL", "prism-balloond")
    machine.until("prism-balloond", "NRestarts", "1")
    machine.until("prism-balloond", "ActiveState", "active")
    assert await ledger(balloond) == before

    # The catalogue afresh.
    with open(machine.configuration / "catalogue.toml", "a") as file:
        file.write('\n[[model]]\nname = "another"\npath = "/opt/prism/examples/models/qwen2-python"\n')
    machine.systemctl("reload", "prism-loader")
    assert await complete(machine.http, "another")
    machine.systemctl("reload", "prism-placement")  # its lists, of which none has changed

    # Its loop stands still: the watchdog's case.
    machine.systemctl("kill", "--signal=STOP", "prism-loader")
    machine.until("prism-loader", "NRestarts", "1")
    machine.until("prism-loader", "ActiveState", "active")

    # An upgrade.
    machine.systemctl("restart", "prism.target")
    second = pids(machine)
    assert {name for name in SERVICES if first[name] == second[name]} == {"keeper"}
    assert await complete(machine.http, MODEL) == text

    # It gives up and says why; the others are none the worse.
    machine.until("prism-gpu-scheduler@1", "ActiveState", "failed")
    assert "/etc/prism/gpu-scheduler-1.toml: No such file or directory" in machine.said()
    machine.systemctl("stop", "prism.target")
    for name in SERVICES:
        machine.until(f"prism-{name}", "ActiveState", "inactive")
        assert machine.shows(f"prism-{name}", "Result") == "success"
