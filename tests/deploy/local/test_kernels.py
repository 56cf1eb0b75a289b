"""Kernels of a local system: where they are kept, and what is said of those that are compiled beforehand."""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path

import pytest

from deploy.local import kernels
from deploy.local.kernels import Precompiled
from deploy.local.processes import LocalSystem
from deploy.local.topology import Process
from testing.patience import PATIENCE_S

ROOT = Path(__file__).resolve().parents[3]


def test_kernel_caches_are_in_the_given_folder_unless_the_user_set_them(tmp_path):
    found = kernels.caches(tmp_path / "kernels", {"TRITON_CACHE_DIR": "/mine", "SGLANG_JIT_CACHE_DIR": ""})
    assert set(found) == set(kernels.CACHES) - {"TRITON_CACHE_DIR"}
    assert all(Path(path).parent == tmp_path / "kernels" and Path(path).is_dir() for path in found.values())


def test_kernel_caches_without_a_writable_folder_are_left_to_the_libraries(tmp_path):
    (tmp_path / "file").write_text("")
    assert kernels.caches(tmp_path / "file" / "kernels", {}) == {}


async def test_processes_of_a_system_get_the_environment_of_kernel_caches(tmp_path):
    class Ended(Exception):
        pass

    process = Process("p", "json.tool", ("--help",), "unix:/none")
    system = LocalSystem([process], tmp_path, print, {"SGLANG_JIT_CACHE_DIR": "/kept"})
    started = {}

    async def start(*command, env, **_):
        started.update(env)
        raise Ended

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(asyncio, "create_subprocess_exec", start)
        with pytest.raises(Ended):
            await system.running["p"].start()
    assert started["SGLANG_JIT_CACHE_DIR"] == "/kept" and started["PATH"] == os.environ["PATH"]


def precompiled(tmp_path, script, say):
    """With a process that runs `script`; the catalogue's path is its first argument, a folder its variable FOLDER."""
    command = (sys.executable, "-c", script)
    environment = {"FOLDER": str(tmp_path)}
    return Precompiled(tmp_path / "c.toml", environment, tmp_path / "log", say, command)


async def test_precompilation_prints_progress_and_its_result(tmp_path):
    os.mkfifo(tmp_path / "go")
    script = """
import os, sys
print("a library says hello")
print('{"of": 3}\\n{"kernel": "rope", "seconds": 1.0}', flush=True)
open(os.environ["FOLDER"] + "/go").read()
print('{"kernel": "kvcache", "seconds": 2.0}\\n{"kernel": "activation", "error": "no nvcc"}')
print(sys.argv[1], file=sys.stderr)
"""
    said, one_is_done = [], asyncio.Event()

    def say(line):
        said.append(line)
        if "1 of 3 so far" in line:
            one_is_done.set()

    going = precompiled(tmp_path, script, say)
    await going.start()
    waiting = asyncio.get_running_loop().create_task(going.wait(every_s=0.01))
    await asyncio.wait_for(one_is_done.wait(), PATIENCE_S)
    assert said[-1].startswith("compiling kernels, once for this machine: 1 of 3 so far, ")
    await asyncio.to_thread((tmp_path / "go").write_text, "")
    await waiting
    assert said[-2].startswith("2 of 3 kernels compiled (")
    assert said[-1] == "activation not compiled beforehand, an engine will try: no nvcc"
    assert (tmp_path / "log").read_text() == f"{tmp_path / 'c.toml'}\n"
    await going.end()


async def test_precompilation_of_nothing_prints_nothing(tmp_path):
    said = []
    going = precompiled(tmp_path, """print('{"of": 0}')""", said.append)
    await going.start()
    await going.wait()
    assert said == []


async def test_precompilation_is_waited_for_only_so_long_and_its_end_ends_the_compilers(tmp_path):
    os.mkfifo(tmp_path / "never")
    script = """
import os, subprocess, sys
read = "open(os.environ['FOLDER'] + '/never').read()"
child = subprocess.Popen([sys.executable, "-c", "import os; " + read])
print('{"of": 1}', flush=True)
print('{"pid": %d}' % child.pid, flush=True)
eval(read)
"""
    said, heard, both_heard = [], [], asyncio.Event()
    going = precompiled(tmp_path, script, said.append)
    hear = going._heard

    def hear_and_note(told):
        heard.append(told)
        hear(told)
        if len(heard) == 2:
            both_heard.set()

    going._heard = hear_and_note
    await going.start()
    await asyncio.wait_for(both_heard.wait(), PATIENCE_S)
    await going.wait(longest_s=0.0)
    (line,) = said
    assert "0 of 1 so far" in line and line.endswith("it goes on, and requests wait for what they need of it")
    compiler = heard[1]["pid"]
    assert os.getpgid(compiler) == going._child.pid
    await going.end()
    while not ended(compiler):
        await asyncio.sleep(0.005)


def ended(pid: int) -> bool:
    """A process that is gone, or that waits for nobody but init to hear of it."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except (FileNotFoundError, ProcessLookupError):
        return True


async def test_precompilation_never_started_is_neither_waited_for_nor_ended(tmp_path):
    said = []
    going = precompiled(tmp_path, "", said.append)
    await going.wait()
    await going.end()
    assert said == []


@pytest.mark.skipif(os.path.exists("/dev/nvidiactl"), reason="there is a GPU")
async def test_precompilation_process_without_a_gpu_says_so(tmp_path):
    said = []
    (tmp_path / "c.toml").write_text("")
    going = Precompiled(tmp_path / "c.toml", {"PYTHONPATH": str(ROOT)}, tmp_path / "log", said.append)
    await going.start()
    await going.wait()
    (line,) = said
    assert line.startswith("kernels not compiled beforehand, an engine will try: "), (tmp_path / "log").read_text()
