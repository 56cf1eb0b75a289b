from balloond.config import BalloondConfig
from deploy.node.consistency import ConfigFile, disagreements
from gateway.config import GatewayConfig
from gpu_scheduler.config import GpuSchedulerConfig
from loader.config import LoaderConfig
from placement.config import PlacementConfig

MIB = 1 << 20


def balloond(**keys):
    devices = [{"name": "cpu:0", "capacity_bytes": MIB}, {"name": "cpu:1", "capacity_bytes": MIB}]
    known = {"name": "b", "listen": "unix:/b", "node": "n", "handoff": "/h", "keeper": "/k", "devices": devices}
    return ConfigFile("balloond.toml", BalloondConfig(**known | keys))


def loader(**keys):
    known = {"name": "l", "listen": "unix:/l", "handoff": "/h", "keeper": "/k", "catalogue": "c.toml"}
    return ConfigFile("loader.toml", LoaderConfig(**known | {"host_capacity_bytes": MIB} | keys))


def group(number=0, **keys):
    known = {"name": "g", "listen": f"unix:/g{number}", "group": f"g{number}", "devices": [f"cpu:{number}"]}
    known |= {"balloond": "unix:/b", "balloond_handoff": "/h"}
    return ConfigFile(f"group-{number}.toml", GpuSchedulerConfig(**known | keys))


def placement(*groups):
    config = PlacementConfig(name="p", listen="unix:/p", groups=[*groups], loaders=["unix:/l"])
    return ConfigFile("placement.toml", config)


def found(*given):
    return [(path, fault.key, fault.what) for path, fault in disagreements(given)]


def test_configurations_of_one_node_that_agree_have_no_fault():
    assert found(balloond(), loader(), group(0), group(1), placement("unix:/g0", "unix:/g1", "host:7004")) == []


def test_services_listening_at_one_address_are_a_fault():
    assert found(group(0), group(1, listen="unix:/g0")) == [
        ("group-1.toml", "listen", "unix:/g0 is that of group-0.toml too")
    ]


def test_services_with_one_metrics_port_are_a_fault_unless_it_is_of_all_interfaces():
    (fault,) = found(group(0, metrics="127.0.0.1:9100"), group(1, metrics="127.0.0.1:9100"))
    assert fault[1] == "metrics"
    assert found(group(0, metrics="0.0.0.0:9100"), group(1, metrics="0.0.0.0:9100")) == []


def test_address_on_which_no_service_of_its_kind_listens_is_a_fault():
    gateway = ConfigFile(
        "gateway.toml", GatewayConfig(name="w", listen="unix:/w", http="[::1]:80", placement="unix:/x")
    )
    lost = [balloond(listen="unix:/2"), loader(listen="127.0.0.1:2"), group(loader="unix:/l"), placement("unix:/g0")]
    assert found(gateway, *lost) == [
        ("gateway.toml", "placement", "no placement of these files listens on unix:/x"),
        ("placement.toml", "loaders.0", "no loader of these files listens on unix:/l"),
        ("group-0.toml", "loader", "no loader of these files listens on unix:/l"),
        ("group-0.toml", "balloond", "no balloond of these files listens on unix:/b"),
    ]
    assert found(gateway, loader()) == [], "there is nothing to compare with"


def test_sockets_other_than_those_of_balloond_are_a_fault():
    wrong = found(balloond(), loader(handoff="/x", keeper="/y"), group(0, balloond_handoff="/z"))
    assert [(path, key) for path, key, _ in wrong] == [
        ("loader.toml", "handoff"),
        ("group-0.toml", "balloond_handoff"),
        ("loader.toml", "keeper"),
    ]
    assert wrong[0][2] == "/x is not /h, which balloond.toml names"


def test_device_unknown_to_balloond_or_in_two_groups_is_a_fault():
    assert found(balloond(), group(0, devices=["cpu:7"])) == [
        ("group-0.toml", "devices.0", "balloond does not manage cpu:7; it has cpu:0, cpu:1")
    ]
    assert found(balloond(), group(0), group(1, devices=["cpu:0"])) == [
        ("group-1.toml", "devices.0", "cpu:0 is in the group of group-0.toml too")
    ]


def test_group_that_no_gpu_scheduler_serves_is_a_fault():
    assert found(group(0), placement("unix:/g0", "unix:/g1")) == [
        ("placement.toml", "groups.1", "no gpu_scheduler of these files listens on unix:/g1")
    ]
    assert found(placement("unix:/g0")) == []


def test_extent_size_of_the_loader_unlike_the_engines_is_a_fault():
    ((path, key, what),) = found(loader(kv_extent_bytes=MIB), group(0))
    assert (path, key) == ("loader.toml", "kv_extent_bytes") and "262144 of the engines of group-0.toml" in what


def test_extent_size_of_a_gpu_in_balloond_unlike_its_engines_is_a_fault():
    gpus = balloond(devices=[{"name": "cuda:0"}, {"name": "cuda:1"}])
    one, two = group(0, devices=["cuda:0"]), group(1, devices=["cuda:1"], engines={"kv_extent_bytes": 2 * MIB})
    ((path, key, what),) = found(gpus, one, two)
    assert (path, key) == ("balloond.toml", "devices.1.kv_extent_bytes")
    assert f"{8 * MIB} is not the {2 * MIB} of the engines of group-1.toml" in what
    assert found(balloond(), group(0), group(1)) == [], "host memory needs no agreement"
