import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from deploy import config, places
from deploy.node.render import HEAD
from deploy.node.schema import schema

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "prism.toml"


@pytest.fixture
def prism(tmp_path, monkeypatch, capsys):
    """Runs `prism config` where prism.toml has this text: (status, what it said)."""
    monkeypatch.chdir(tmp_path)

    def run(text, *arguments):
        (tmp_path / "prism.toml").write_text(text)
        status = config.main(list(arguments))
        said = capsys.readouterr()
        return status, said.out + said.err

    return run


def test_render_writes_nothing_if_anything_is_wrong_or_a_file_differs(prism, tmp_path):
    to = ("render", "--to", "systemd", "--out", "out")
    status, said = prism("[loader]\nhost_capacity = 1\n", *to)
    assert status == 1 and "prism.toml:2: loader.host_capacity: unknown key" in said
    assert not (tmp_path / "out").exists()

    status, said = prism("devices = ['cuda:0', 'cuda:1']", *to)
    assert status == 0
    made = sorted(path for path in (tmp_path / "out").rglob("*") if path.is_file())
    assert [line for line in said.splitlines() if line.startswith("out/")] and len(made) == 16
    assert f"install -m 644 -D -t /etc/prism {tmp_path}/out/*.toml" in said

    (tmp_path / "out" / "loader.toml").write_text("# mine\n")
    (tmp_path / "out" / "gateway.toml").unlink()
    status, said = prism("devices = ['cuda:0', 'cuda:1']", *to)
    assert status == 1 and said.splitlines()[0] == "out/loader.toml is there and differs"
    assert not (tmp_path / "out" / "gateway.toml").exists()

    status, said = prism("", *to, "--force")
    assert status == 0 and "host_capacity_bytes" in (tmp_path / "out" / "loader.toml").read_text()
    assert "out/gpu-scheduler-1.toml was made earlier" in said


def test_files_are_all_written_though_nobody_reads_what_is_said(tmp_path):
    (tmp_path / "prism.toml").write_text("devices = ['cuda:0']")
    command = [sys.executable, "-m", "deploy", "config", "render", "--to", "systemd", "--out", "out"]
    places_of = {**os.environ, "PYTHONPATH": str(places.TREE)}
    process = subprocess.Popen(command, cwd=tmp_path, env=places_of, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    process.stdout.close()
    assert (process.stderr.read(), process.wait()) == (b"", 141)
    assert (tmp_path / "out" / "loader.toml").is_file() and (tmp_path / "out" / "balloond.toml").is_file()


def test_render_says_how_models_of_the_hub_come_to_the_node_and_keys_to_the_cluster(prism, tmp_path):
    text = "models = ['Qwen/Qwen3-0.6B']\nmodels_folder = '/srv/models'\nkeys_file = '/k/keys.toml'"
    status, said = prism(text, "render", "--to", "kubernetes", "--out", "out")
    assert status == 0
    assert "hf download Qwen/Qwen3-0.6B --local-dir /srv/models/Qwen/Qwen3-0.6B" in said
    assert "create secret generic prism-keys --from-file=keys.toml=/k/keys.toml" in said
    assert 'path = "/models/Qwen/Qwen3-0.6B"' in (tmp_path / "out" / "10-models.yaml").read_text()


def test_check_says_what_was_understood_and_refuses_models_that_cannot_be_served(prism, tmp_path):
    assert config.main(["check", str(EXAMPLE)]) == 0
    (tmp_path / "empty").mkdir()
    model = EXAMPLE.parent / "models" / "llama-debian"
    text = f"models = ['{model}', 'org/away', '/nowhere/m', 'smollm2']\ntargets.ttft_ms = 7\ndevices = ['cuda:0']\n"
    status, said = prism(text, "check", "--to", "systemd")
    assert status == 0
    assert "devices   cuda:0\n" in said
    assert f"llama-debian: {model}, " in said and "MiB of weights" in said and "ttft_ms 7" in said
    assert "org/away: org/away of the Hugging Face hub" in said
    assert "m: /nowhere/m, which is not on this machine" in said
    assert "keys      none: whoever reaches the gateway may ask" in said
    status, said = prism(f"keys_file = 'gone.toml'\n{text}", "check")
    assert status == 1 and "m: refused: there is no folder /nowhere/m" in said
    assert f"keys      refused: there is no file {tmp_path}/gone.toml" in said
    assert "smollm2: smollm2, which prism serve makes" in said
    status, said = prism("models = ['empty']", "check")
    assert status == 1 and "empty: refused: its folder is empty" in said


def test_check_without_devices_is_of_this_machine(prism, monkeypatch):
    monkeypatch.setattr(config, "first", lambda: "cpu")
    model = EXAMPLE.parent / "models" / "llama-debian"
    status, said = prism(f"models = ['{model}']\nstate = '/tmp/p'", "check")
    assert status == 0 and "devices   cpu: the first GPU, or cpu without one" in said and "GiB" not in said
    assert "gRPC      unix:/tmp/p/gateway.sock" in said
    _, said = prism("", "check")
    assert f"gRPC      unix:{places.state()}/gateway.sock" in said


def test_render_reads_no_folder_that_it_has_no_files_in_and_quotes_paths(prism, tmp_path):
    (tmp_path / "an out" / "mine").mkdir(parents=True)
    for folder in ("an out", "an out/mine"):
        (tmp_path / folder / "old.toml").write_text(HEAD)
    status, said = prism("", "render", "--to", "systemd", "--out", "an out")
    assert status == 0 and "an out/old.toml was made earlier" in said and "mine/old.toml" not in said
    assert f"-t /etc/prism '{tmp_path}/an out'/*.toml" in said and f"'{tmp_path}/an out'/units/*.service" in said


def test_schema_is_printed_as_json(prism):
    status, said = prism("", "schema")
    assert status == 0 and json.loads(said) == schema()
