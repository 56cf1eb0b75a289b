import asyncio
import fcntl
import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path

import pytest

from deploy import __main__ as prism
from deploy.local import __main__ as local
from testing.patience import PATIENCE_S
from testing.ports import free_port
from tests.loader import checkpoint_files

ROOT = Path(__file__).resolve().parents[3]


async def start(*arguments):
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "deploy.local", *arguments, cwd=ROOT,
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    out, err = await process.communicate()
    return process.returncode, (out + err).decode()


async def test_a_second_system_in_the_same_folder_is_refused_in_one_line(tmp_path):
    with open(tmp_path / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        status, out = await start("--state", str(tmp_path))
    assert status == 1
    assert len(out.splitlines()) == 1 and "runs in" in out and "--state" in out


async def test_folders_without_a_model_are_named_one_per_line(tmp_path):
    models = ("m=/nowhere/v=3", str(tmp_path), "gpt")
    with tempfile.TemporaryDirectory(prefix="prism-") as state:  # short, for sockets
        status, out = await start("--state", state, "--models", *models)
    assert (status, out) == (
        1,
        "prism: no model can be served:\n"
        "  m: /nowhere/v=3: its folder does not exist\n"
        f"  {tmp_path.name}: {tmp_path}: its folder is empty\n"
        f"  gpt: {ROOT}/gpt: its folder does not exist; a model of the Hugging Face hub is ORG/NAME\n",
    )


async def test_invalid_catalogue_is_one_line_before_anything_starts(tmp_path):
    (tmp_path / "c.toml").write_text("[[model]\n")
    status, out = await start("--state", str(tmp_path), "--catalogue", str(tmp_path / "c.toml"))
    assert status == 1 and out.startswith("prism: no catalogue that can be used: ") and out.count("\n") == 1


def test_make_serve_passes_every_folder_unchanged():
    models = "/models/a b=/v=3/c org/d=/models/d"
    said = subprocess.run(
        ["make", "-n", "serve", f"MODELS={models}", f"PYTHON={sys.executable}"],
        cwd=ROOT,
        env={name: value for name, value in os.environ.items() if not name.startswith("MAKE")},  # tests may run in make
        capture_output=True,
        text=True,
    )
    assert f" --models {models} " in said.stdout.splitlines()[-1] + " "


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--catalogue", "/nowhere.toml"), "no catalogue at /nowhere.toml"),
        (("--device-mib", "0"), "--device-mib"),
        (("--cors-origin", "http://localhost:3000/"), 'write "http://localhost:3000"'),
        (("--cors-origin", "*", "--cors-origin", "http://localhost:3000"), "name no other beside it"),
        (("--state", "/tmp/" + "x" * 90), "too long a path"),
        (("s3://bucket/model",), "s3:// is not supported"),
        (("org/m", "--catalogue", "models.toml"), "the catalogue has the models"),
        (("org/m", "./m", "--name", "m"), "--name is for one model"),
        (("--port", "99999"), "'127.0.0.1:99999' is no address"),
        (("--http", "foo"), "argument --http: 'foo' is no address"),
        (("--http", "127.0.0.1:${PORT}"), "argument --http: '127.0.0.1:${PORT}' is no address"),
        (("--name", "x"), "--name is given without a model"),
        (("",), "a model is an empty text"),
        (("--device", "cpu:0"), "cpu:0: each needs its MiB of memory: --device-mib 27"),
        (("org/a", "a=org/b", "a=org/c"), "the name 'a' is given twice, for org/b and org/c"),
    ],
)
async def test_impossible_arguments_of_a_local_system_are_refused_in_one_line(arguments, words):
    status, out = await start(*arguments)
    assert status != 0
    assert words in out


async def test_port_that_is_taken_is_said_before_anything_starts(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        status, out = await start("--state", str(tmp_path), "--port", str(port))
    assert (status, out) == (
        1,
        f"prism: 127.0.0.1:{port} is taken by another process; name another port with --port\n",
    )


async def test_models_that_the_host_cannot_hold_are_refused_in_one_line(tmp_path):
    folder = checkpoint_files.write(tmp_path / "huge")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 1 << 30}))
    status, out = await start("--state", str(tmp_path), "--models", str(folder))
    assert status == 1
    assert re.fullmatch(r"prism: huge needs [0-9,]+ MiB on the CPU.* --device-mib is taken as it is\n", out)


async def test_described_system_with_dying_engines_and_a_bad_folder_says_so_and_serves_the_rest(tmp_path):
    (tmp_path / "sglang").mkdir()
    (tmp_path / "sglang" / "__init__.py").write_text("raise ImportError('libcudart.so.12 is nowhere')")
    good = ROOT / "examples" / "models" / "llama-debian"
    with tempfile.TemporaryDirectory(prefix="prism-") as state:  # short, for sockets
        description = tmp_path / "prism.toml"
        description.write_text(
            f'models = ["{good}", {{ path = "/nowhere/v=3", name = "bad" }}]\nhttp = "127.0.0.1:{free_port()}"\n'
            f'state = "{state}"\ndevices = [{{ name = "cpu:0", capacity_bytes = {27 << 20} }}]\n'
            "targets.ttft_ms = 7\nplacement.idle_s = 3.0\nscheduler.engines.stall_timeout_s = 40.0\n"
        )
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "deploy", "serve", "--config", str(description),
            cwd=ROOT, stdout=asyncio.subprocess.PIPE, env={**os.environ, "PYTHONPATH": str(tmp_path)},
        )  # fmt: skip
        lines = []
        try:
            async with asyncio.timeout(PATIENCE_S):
                while not lines or "Ctrl-C ends everything" not in lines[-1]:
                    line = await process.stdout.readline()
                    assert line, "".join(lines)
                    lines.append(line.decode())
                process.send_signal(signal.SIGINT)
                lines.append((await process.stdout.read()).decode())
                assert await process.wait() == 0
                settings = {path.stem: tomllib.loads(path.read_text()) for path in Path(state).glob("*.toml")}
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
    said = "".join(lines)
    assert "prism: bad cannot be served, the others are: /nowhere/v=3: its folder does not exist\n" in said
    (died,) = (line for line in lines if line.startswith("prism: cpu:0: engines do not start: engine "))
    assert died.endswith("logs/gpu_scheduler-cpu-0.log\n") and "    ImportError: libcudart.so.12 is nowhere\n" in lines
    rows = {line.split()[0]: line for line in lines if line.strip()}
    assert "engines do not start" in rows["cpu:0"]
    assert rows["bad"].endswith("error: /nowhere/v=3: its folder does not exist\n")
    assert "on disk" in rows["llama-debian"]
    assert [model["ttft_ms"] for model in settings["models"]["model"]] == [7, 7]
    assert settings["placement"]["idle_s"] == 3.0 and settings["balloond"]["devices"][0]["capacity_bytes"] == 27 << 20
    engines = settings["gpu_scheduler-cpu-0"]["engines"]
    assert engines["stall_timeout_s"] == 40.0 and engines["kind"] == "sglang"


def test_port_zero_becomes_the_port_that_is_served():
    host, _, port = local._free("127.0.0.1:0").rpartition(":")
    assert host == "127.0.0.1" and int(port) > 0


def test_ctrl_c_before_anything_has_started_is_one_line(monkeypatch, capsys):
    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr("deploy.config.main", interrupted)
    monkeypatch.setattr(sys, "argv", ["prism", "config"])
    monkeypatch.setenv("PYTHONSAFEPATH", "")  # so that what `main` sets is undone: tests start programs of the tree
    monkeypatch.delenv("PYTHONSAFEPATH")
    assert prism.main() == 130
    monkeypatch.setattr(local, "arguments", interrupted)
    assert local.run([]) == 130
    said = capsys.readouterr()
    assert said.out + said.err == "prism: stopped\n" * 2
