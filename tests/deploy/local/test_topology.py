from deploy.local.topology import Local


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
