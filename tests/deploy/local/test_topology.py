import tomllib

from deploy.local.topology import Local, to_toml


def test_configuration_written_as_toml_is_read_back_unchanged():
    config = {"name": "x", "n": 3, "f": 0.5, "on": True, "list": ["a", "b"], "devices": [{"name": "cpu:0", "size": 1}]}
    config |= {"engines": {"kind": "echo", "options": {"step_ms": "5"}}, "quoted": 'a "b" \\ c'}
    assert tomllib.loads(to_toml(config)) == config


def test_local_system_with_groups_has_only_their_devices(tmp_path):
    one, two = {"cpu:0": 5}, {"cpu:1": 7, "cpu:2": 7}
    local = Local(state=tmp_path, catalogue=tmp_path / "c.toml").with_groups([one, two])
    assert local.devices == one | two and local.group_names == {"cpu:0": ("cpu:0",), "cpu:1+cpu:2": ("cpu:1", "cpu:2")}


def test_processes_of_a_local_system_come_after_those_they_need(tmp_path):
    plan = Local(state=tmp_path, catalogue=tmp_path / "c.toml").processes()
    seen = set()
    for process in plan:
        assert set(process.after) <= seen, process.name
        seen.add(process.name)
    assert len([name for name in seen if name.startswith("gpu_scheduler")]) == 2
