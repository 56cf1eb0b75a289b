import pytest

from deploy.node.reading import read
from deploy.node.targets import SERVE, TARGETS
from services.errors import Invalid

MADE = "has no place here: "
REMOVED = """[loader]
copy_threads = 3
[scheduler.engines.options]
window_pool = 1
max_running_requests = 4
"""
FAULTS = [
    ("models = ", SERVE, "not TOML: Invalid value (at end of document)"),
    ("\ndevces = []", SERVE, ":2: devces: unknown key; the nearest one is devices"),
    ("[[models]]\npath = 'a'\nttft = 3", SERVE, ":3: models.0.ttft: unknown key; the nearest one is ttft_ms"),
    ("[[models]]\nname = 'a'", SERVE, ":1: models.0.path: it is required, and is not there"),
    ("models = ['a', 'x/a', 'a']", SERVE, ":1: models.2.name: the name 'a' is given twice"),
    ("models = ['s3://bucket/a']", SERVE, ":1: models.0.path: s3://bucket/a: s3:// is not supported"),
    ("models = ['a b']", SERVE, ":1: models.0: 'a b' gives no name that a model can have: write name and path"),
    ("devices = ['gpu0']", SERVE, ":1: devices.0.name: 'gpu0' is no device"),
    (
        "devices = ['cuda:0+cuda:1+cuda:2']",
        SERVE,
        ":1: devices: gpu-scheduler-0: devices: a group has 1, 2 or 4 devices",
    ),
    ("devices = ['cuda:0', 'cuda:0']", SERVE, "cuda:0 is in the group of gpu-scheduler-0 too"),
    ("devices = ['cpu:0']", SERVE, ":1: devices: balloond: devices.0: cpu:0 needs capacity_bytes"),
    ("devices = ['cuda']", TARGETS["systemd"], ':1: devices.0: "cuda" is whatever a machine has'),
    ("\nhttp = '8000'", SERVE, ':2: http: "8000" is not "HOST:PORT"'),
    ("[gateway]\nhttp = 'a:1'", SERVE, f":2: gateway.http: {MADE}write http, which it is made of"),
    ("[placement]\ngroups = []", SERVE, f":2: placement.groups: {MADE}services find each other by it"),
    ("\n[scheduler.engines]\nwrm = 1", SERVE, ":3: scheduler.engines.wrm: unknown key; the nearest one is warm"),
    ("[loader]\n\nhost_capacity_bytes = 0", SERVE, ":3: loader.host_capacity_bytes: it should be greater than 0"),
    (
        "[[devices]]\nname = 'cuda:0'\nkv_extent_bytes = 4096\n[scheduler.engines]\nkv_extent_bytes = 4096",
        SERVE,
        ": loader: kv_extent_bytes: 8388608 is not the 4096",
    ),
    (
        "[loader]\nkv_extent_bytes = 4096\n[scheduler.engines]\nkv_extent_bytes = 4096",
        SERVE,
        "devices.0.kv_extent_bytes: 8388608 is not the 4096",
    ),
    ("models = ['/a']\nmodels_folder = '/b'", TARGETS["compose"], ":1: models.0: /a is not below models_folder, /b"),
    ("http = '127.0.0.1:${NOWHERE_SET}'", SERVE, ":1: http: NOWHERE_SET is not set in the environment"),
    (
        "[gateway]\ndrain_s = inf",
        TARGETS["systemd"],
        ":2: gateway.drain_s: it should be at most 86400",
    ),
    ("grpc = '127.0.0.1:8000'", SERVE, ":1: grpc: 127.0.0.1:8000 is the port of http too"),
    ("grpc = '0.0.0.0:8000'", TARGETS["compose"], ":1: grpc: 0.0.0.0:8000 is the port of http too"),
    (
        "metrics_port = 7990",
        TARGETS["systemd"],
        ":1: metrics_port: 127.0.0.1:8000 of gpu-scheduler-0 is the port of http too",
    ),
    ("metrics_port = 7998", SERVE, ":1: metrics_port: 127.0.0.1:8000 of gpu-scheduler-0 is the port of http too"),
    ("metrics_port = 1", SERVE, ":1: metrics_port: 1: ports below 1024 are the system's"),
    ("metrics_port = '9100'", SERVE, ":1: metrics_port: it should be a whole number"),
    ("traces = 'yes'", SERVE, ":1: traces: it should be true or false"),
    ("[gateway]\ntraces = 'yes'", SERVE, ":2: gateway.traces: it should be true or false"),
    ("[scheduler.engines]\nwarm = '1'", SERVE, ":2: scheduler.engines.warm: it should be a whole number"),
    ("targets.ttft_ms = '5'", SERVE, ":1: targets.ttft_ms: it should be a whole number"),
    ("devices = ['cuda:0+cuda:0']", SERVE, ":1: devices.0.name: cuda:0 is there twice"),
    ("[[models]]\npath = 'a'\ndevices = 2", TARGETS["systemd"], ":1: models.0: a is for groups of 2 devices"),
    ("devices = ['cuda:0+cuda:1']\nmodels = ['a']", SERVE, ":2: models.0: a is for groups of 1 device (devices)"),
    ("nodes = ['a', 'a']", TARGETS["systemd"], ":1: nodes: 'a' is there twice"),
    (f"state = '/tmp/{'x' * 115}'", SERVE, ":1: state: it is too long a path for Unix sockets"),
    ("[[devices]]\nname = 'cpu'\ncapacity_bytes = 99", SERVE, ':1: devices.0: "cpu" is whatever there is'),
    ("[gateway]\nusage_file = 'u'", TARGETS["compose"], ":2: gateway.usage_file: a container of the gateway has no"),
    ("models = [3]", SERVE, ":1: models.0: it should be a table"),
    ("nodes = 3", SERVE, ":1: nodes: it should be a list"),
    ("nodes = ['a']", TARGETS["kubernetes"], ":1: nodes: is for systemd only"),
    ("devices = ['cuda:1']", TARGETS["kubernetes"], ":1: devices: a pod has the GPUs that it claims, and sees them as"),
]


@pytest.mark.parametrize(("text", "target", "says"), FAULTS, ids=[says for _, _, says in FAULTS])
def test_fault_of_a_description_is_one_line_with_its_place(tmp_path, text, target, says):
    file = tmp_path / "prism.toml"
    file.write_text(text)
    with pytest.raises(Invalid) as error:
        read(file, target)
    (line,) = str(error.value).splitlines()
    assert line.startswith(str(file)) and says in line


def test_all_faults_are_said_at_once(tmp_path):
    file = tmp_path / "prism.toml"
    file.write_text("[gateway]\nmost_in_flight = 0\n\n[balloond]\nkeeper = 'x'\n")
    with pytest.raises(Invalid) as error:
        read(file, SERVE)
    assert [line.split(": ")[1] for line in str(error.value).splitlines()] == [
        "balloond.keeper",
        "gateway.most_in_flight",
    ]


def test_faults_of_all_levels_are_said_at_once(tmp_path):
    file = tmp_path / "prism.toml"
    file.write_text("http = '${NOWHERE_SET}'\nmetrics_port = '9'\n[gateway]\nmost_in_flight = 0\n")
    with pytest.raises(Invalid) as error:
        read(file, SERVE)
    assert [line.split(": ")[1] for line in str(error.value).splitlines()] == [
        "http",
        "metrics_port",
        "gateway.most_in_flight",
    ]


def test_variables_are_filled_in_where_the_services_start(tmp_path, monkeypatch):
    monkeypatch.setenv("PORT", "8123")
    file = tmp_path / "prism.toml"
    file.write_text("http = '127.0.0.1:${PORT}'\n[gateway]\nusage_file = 'usage.jsonl'\n")
    assert read(file, SERVE).http == "127.0.0.1:8123"
    assert read(file, TARGETS["systemd"]).http == "127.0.0.1:${PORT}"
    assert read(file, SERVE).gateway == {"usage_file": f"{tmp_path}/usage.jsonl"}


@pytest.mark.parametrize("target", [SERVE, *TARGETS.values()])
def test_empty_file_describes_one_gpu(tmp_path, target):
    (tmp_path / "prism.toml").write_text("")
    node = read(tmp_path / "prism.toml", target)
    assert node.groups == [{"cuda:0": {}}] and node.entries() == []


def test_models_have_folders_names_and_targets(tmp_path):
    file = tmp_path / "prism.toml"
    file.write_text(
        "models = ['a', 'Qwen/Qwen3-0.6B@v1', {path = '../b', name = 'c', ttft_ms = 9, pinned = true}]\n"
        "models_folder = 'models'\ntargets = {ttft_ms = 5, tpot_ms = 6}\nkeys_file = 'keys.toml'\n"
    )
    node = read(file, SERVE)
    defaults = {"ttft_ms": 5, "tpot_ms": 6}
    assert node.entries() == [
        {"name": "a", "path": f"{tmp_path}/models/a", **defaults},
        {"name": "Qwen/Qwen3-0.6B", "path": f"{tmp_path}/models/Qwen/Qwen3-0.6B@v1", **defaults},
        {"name": "c", "path": f"{tmp_path}/b", "ttft_ms": 9, "tpot_ms": 6, "pinned": True},
    ]
    assert node.keys_file == f"{tmp_path}/keys.toml"
    (gateway,) = (each.settings for each in SERVE.services(node) if each.kind == "gateway")
    assert gateway["keys_file"] == node.keys_file
    file.write_text("keys_file = '${KEYS}/keys.toml'")
    assert read(file, TARGETS["systemd"]).keys_file == "${KEYS}/keys.toml"  # filled in by the gateway


@pytest.mark.parametrize("target", [SERVE, TARGETS["systemd"]])
def test_settings_that_services_no_longer_have_are_told_with_their_lines_and_left_out(target, tmp_path):
    file, said = tmp_path / "prism.toml", []
    file.write_text(REMOVED + "".join(f"[[devices]]\nname = 'cuda:{number}'\n" for number in range(2)))
    node = read(file, target, said.append)
    assert [line.partition(": it is not a setting any more")[0] for line in said] == [
        f"{file}:2: loader.copy_threads",
        f"{file}:4: scheduler.engines.options.window_pool",
    ]
    assert node.loader == {} and node.scheduler == {"engines": {"options": {"max_running_requests": 4}}}
