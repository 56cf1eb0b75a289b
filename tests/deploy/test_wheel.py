"""The wheel and the sdist: built once, installed into an environment without the tree, and used from elsewhere."""

import asyncio
import importlib.metadata
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tarfile
import tempfile
import tomllib
import zipfile
from pathlib import Path

import pytest

from testing.hub import hub
from testing.patience import PATIENCE_S
from testing.ports import free_port
from tests.loader import checkpoint_files

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = (
    *("protos", "services", "balloond", "loader", "gpu_scheduler", "placement", "gateway", "kv_kinds", "tokenization"),
    "prismctl",
    *("deploy", "sim"),
)
BUILT = (*PACKAGES, "examples", "requirements", *("pyproject.toml", "setup.py", "MANIFEST.in", "README.md", "LICENSE"))
GENERATED = re.compile(r"protos/\w+_pb2(_grpc)?\.pyi?")
ELSEWHERE = re.compile(r"deploy/(compose|k8s|systemd)/|deploy/local/install\.sh")
"""Files of packages that a wheel does not have: they are used from a checkout."""


def build(tree, kind):
    """Builds in a tree as pip does; returns the path of the result."""
    code = f"from setuptools import build_meta; print(build_meta.build_{kind}('dist'))"
    out = subprocess.run([sys.executable, "-c", code], cwd=tree, capture_output=True, text=True)
    assert out.returncode == 0, out.stderr
    return tree / "dist" / out.stdout.splitlines()[-1]


@pytest.fixture(scope="module")
def sdist(tmp_path_factory):
    """Of a clean copy of the tree, which has no generated code."""
    tree = tmp_path_factory.mktemp("tree")
    for name in BUILT:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, tree / name, ignore=shutil.ignore_patterns("__pycache__", "*_pb2*"))
        else:
            shutil.copyfile(ROOT / name, tree / name)
    return build(tree, "sdist")


@pytest.fixture(scope="module")
def wheel(sdist, tmp_path_factory):
    """Of what the sdist has."""
    folder = tmp_path_factory.mktemp("sdist")
    with tarfile.open(sdist) as archive:
        archive.extractall(folder, filter="data")
    (tree,) = folder.iterdir()
    return build(tree, "wheel")


@pytest.fixture(scope="module")
def scripts(wheel, tmp_path_factory):
    """The scripts of an environment that has the wheel, and beside it the packages of this one but not its tree."""
    venv = tmp_path_factory.mktemp("environment")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", venv], check=True)
    (packages,) = venv.glob("lib/python*/site-packages")
    (packages / "others.pth").write_text("".join(f"{path}\n" for path in sys.path if path.endswith("site-packages")))
    pip = (sys.executable, "-m", "pip", "--python", venv / "bin" / "python", "--disable-pip-version-check")
    subprocess.run([*pip, "install", "--quiet", "--no-index", "--no-deps", wheel], check=True)
    return venv / "bin"


@pytest.fixture(scope="module")
def elsewhere(tmp_path_factory):
    """A folder where a user may be: it has files whose names are those of our packages."""
    folder = tmp_path_factory.mktemp("elsewhere")
    for name in ("services", "loader", "deploy"):
        (folder / f"{name}.py").write_text("raise SystemExit('the wrong file was imported')\n")
    return folder


def test_wheel_has_every_file_of_the_packages_and_the_generated_code(wheel):
    tree = {
        str(path.relative_to(ROOT))
        for package in PACKAGES
        for path in (ROOT / package).rglob("*")
        if path.is_file() and path.suffix != ".pyc"
    }
    names = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    code = {name for name in names if not name.startswith("deploy/shipped/")}
    assert {name for name in tree - code if not ELSEWHERE.match(name) and not GENERATED.match(name)} == set()
    assert {name for name in code - tree if not GENERATED.match(name)} == set()
    for proto in (ROOT / "protos").glob("*.proto"):
        assert {f"protos/{proto.stem}_pb2{end}" for end in (".py", ".pyi", "_grpc.py")} <= code


def test_generator_of_a_build_is_the_one_of_the_development_requirements():
    requires = tomllib.loads((ROOT / "pyproject.toml").read_text())["build-system"]["requires"]
    (generator,) = (each for each in requires if each.startswith("grpcio-tools"))
    assert generator in (ROOT / "requirements" / "dev.txt").read_text().splitlines()


def test_installed_commands_answer_from_a_folder_elsewhere(scripts, elsewhere, tmp_path):
    def said(*command):
        return subprocess.run([*command], cwd=elsewhere, capture_output=True, text=True, check=True).stdout

    commands = ("serve", "fetch", "config", "install")
    assert all(f"  {command} " in said(scripts / "prism", "--help") for command in commands)
    assert said(scripts / "prism", "--version").strip() == importlib.metadata.version("prism-serve")
    assert "--port PORT" in said(scripts / "prism", "serve", "--help")
    assert "prismctl top" in said(scripts / "prismctl", "top", "--help")
    steps = said(scripts / "prism", "install", "cpu", "--print").splitlines()
    assert "torch==2.13.0+cpu" in steps[0] and "download.pytorch.org/whl/cpu" in steps[0] and "--no-deps" in steps[2]
    for name in re.findall(r"\S+\.txt", "\n".join(steps)):
        assert Path(name).read_bytes() == (ROOT / "requirements" / Path(name).name).read_bytes()
    (tmp_path / "prism.toml").write_text("")
    for to, name in (("systemd", "units/prism.target"), ("compose", "compose.yaml"), ("kubernetes", "30-node.yaml")):
        said(scripts / "prism", "config", "render", tmp_path / "prism.toml", "--to", to, "--out", tmp_path / to)
        assert (tmp_path / to / name).exists()
    code = (
        "import importlib.metadata as m; (p,) = m.entry_points(group='sglang.srt.plugins'); "
        "print(p.value, m.requires('prism-serve'))"
    )
    plugin, requires = said(scripts / "python", "-P", "-c", code).split(" ", 1)
    assert plugin == "gpu_scheduler.engines.sglang.plugin:register" and "'grpcio==" in requires


async def test_installed_prism_serves_a_model_of_the_hub_from_a_folder_elsewhere(scripts, elsewhere, tmp_path):
    """The engine is one that fails at once: what it would answer is the business of other tests."""
    (tmp_path / "sglang").mkdir()
    (tmp_path / "sglang" / "__init__.py").write_text("raise ImportError('no engine here')")
    with hub() as remote, tempfile.TemporaryDirectory(prefix="prism-") as home:  # short, for sockets
        remote.publish("org/model", checkpoint_files.write(tmp_path / "model"), revision="v1")
        port = free_port()
        environment = os.environ | {"HOME": home, "XDG_STATE_HOME": "", "XDG_CACHE_HOME": "", "HF_HOME": f"{home}/hf"}
        environment |= {"HF_ENDPOINT": remote.address, "PYTHONPATH": str(tmp_path)}
        process = await asyncio.create_subprocess_exec(
            scripts / "prism", "serve", "org/model@v1", "--port", str(port), "--device-mib", "27", cwd=elsewhere,
            stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT, env=environment,
        )  # fmt: skip
        lines = []
        try:
            async with asyncio.timeout(PATIENCE_S):
                while not lines or "Ctrl-C ends everything" not in lines[-1]:
                    line = await process.stdout.readline()
                    assert line, "".join(lines)
                    lines.append(line.decode())
                asked = await asyncio.create_subprocess_exec(
                    scripts / "prismctl", "models", "list", "--json", cwd=elsewhere,
                    stdout=asyncio.subprocess.PIPE, env=environment,
                )  # fmt: skip
                (model,) = json.loads((await asked.communicate())[0])
                process.send_signal(signal.SIGINT)
                lines.append((await process.stdout.read()).decode())
                assert await process.wait() == 0
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
        assert model["model"] == "org/model" and model["path"].startswith(f"{home}/hf/hub/")
    said = "".join(lines)
    assert lines[0].startswith("prism: org/model@v1: fetching 3 files of 4, "), said
    assert f"curl -s http://127.0.0.1:{port}/v1/chat/completions" in said and '{"model": "org/model"' in said
    assert re.search(r"^  org/model +[\d.]+ MiB   on disk$", said, re.M)
    assert f"{scripts / 'prismctl'} --state " in said
    assert sorted(os.listdir(elsewhere)) == ["deploy.py", "loader.py", "services.py"]
