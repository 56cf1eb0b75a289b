"""What is compiled before an engine needs it, with compilers that only write it down."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from gpu_scheduler.engines.sglang import precompile
from gpu_scheduler.engines.sglang.policy import jit
from gpu_scheduler.engines.sglang.precompile import Done
from testing.patience import PATIENCE_S

MODULES = [jit.clamp_position("int64"), jit.activation("bfloat16"), jit.kvcache(2048)]


def model(folder: Path, **config: object) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def test_kernel_modules_of_a_catalogue_are_those_of_its_models_each_once(tmp_path):
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64, "dtype": "bfloat16"}
    model(tmp_path / "a", **heads)
    model(tmp_path / "b", **heads)
    model(tmp_path / "echoes", **heads | {"head_dim": 32})
    model(tmp_path / "list").joinpath("config.json").write_text("[]")
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "config.json").write_text("{")
    (tmp_path / "c.toml").write_text(
        '[[model]]\nname = "a"\npath = "a"\n[[model]]\nname = "b"\npath = "b"\ndevices = 2\n'
        '[[model]]\nname = "broken"\npath = "broken"\n[[model]]\nname = "away"\npath = "away"\n'
        '[[model]]\nname = "list"\npath = "list"\n[[model]]\nname = "nowhere"\n'
        '[[model]]\nname = "echoes"\npath = "echoes"\nengine = "echo"\n'
    )
    found = precompile.of_catalogue(tmp_path / "c.toml")
    assert found == jit.needed(heads, 1) | jit.needed(heads, 2) and len(found) == 5


def test_kernels_are_compiled_side_by_side_and_recorded_as_done(tmp_path, monkeypatch):
    monkeypatch.setattr(precompile.os, "cpu_count", lambda: 16)
    together = threading.Barrier(len(MODULES))
    said = []
    done = Done(tmp_path / "cache", "sglang 1, 9.0")
    assert precompile.compile_all(done.missing(MODULES), lambda _: together.wait(PATIENCE_S), done, said.append) == 0
    assert sorted(each["kernel"] for each in said) == sorted(map(str, MODULES))
    assert Done(tmp_path / "cache", "sglang 1, 9.0").missing(MODULES) == []
    assert len(Done(tmp_path / "cache", "sglang 2, 9.0").missing(MODULES)) == len(MODULES)
    assert len(Done(tmp_path / "other", "sglang 1, 9.0").missing(MODULES)) == len(MODULES)


def test_kernel_that_cannot_be_compiled_is_one_line_and_tried_again_the_next_time(tmp_path):
    said = []

    def make(module):
        if module == MODULES[1]:
            raise RuntimeError("ninja exited with status 1\nstdout:\n[1/2] nvcc\ncuda.cu(3): error: no such thing\n")

    done = Done(tmp_path, "x")
    assert precompile.compile_all(done.missing(MODULES), make, done, said.append) == 1
    assert [each["error"] for each in said if "error" in each] == ["cuda.cu(3): error: no such thing"]
    assert Done(tmp_path, "x").missing(MODULES) == [MODULES[1]]


@pytest.mark.parametrize("text", ["{", "3", '{"a": 1}'])
def test_unreadable_record_of_compiled_kernels_counts_as_empty(tmp_path, text):
    (tmp_path / "prism-compiled.json").write_text(text)
    assert len(Done(tmp_path, "x").missing(MODULES)) == len(MODULES)


def lines(out: str) -> list[dict[str, object]]:
    return [json.loads(line) for line in out.splitlines()]


def test_precompile_process_prints_the_number_of_kernels_and_then_each(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("SGLANG_JIT_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(precompile, "architecture", lambda: (9, 0))
    imported = []
    monkeypatch.setattr(precompile, "import_sglang", lambda found, _: imported.append(found) or (lambda module: None))
    model(tmp_path / "a")
    (tmp_path / "c.toml").write_text('[[model]]\nname = "a"\npath = "a"\n')
    assert precompile.main([str(tmp_path / "c.toml")]) == 0
    first, each = lines(capsys.readouterr().out)
    assert (first, each["kernel"], imported) == ({"of": 1}, "clamp_position(int64)", [(9, 0)])
    assert precompile.main([str(tmp_path / "c.toml")]) == 0
    assert lines(capsys.readouterr().out) == [{"of": 0}] and len(imported) == 1, "nothing is imported to find that out"


def test_precompile_without_a_gpu_or_a_catalogue_prints_one_line(tmp_path, capsys, monkeypatch):
    assert precompile.main([str(tmp_path / "none.toml")]) == 1
    (told,) = lines(capsys.readouterr().out)
    assert "none.toml" in told["error"]

    def nowhere():
        raise OSError("NVML: no driver")

    monkeypatch.setattr(precompile, "architecture", nowhere)
    (tmp_path / "c.toml").write_text("")
    assert precompile.main([str(tmp_path / "c.toml")]) == 1
    assert lines(capsys.readouterr().out) == [{"error": "NVML: no driver"}]


@pytest.mark.sglang
def test_sglang_compiles_kernels_for_the_architecture_that_it_is_given(tmp_path):
    """In a process of its own, with its real loader and a compiler that writes down what it is asked for."""
    code = f"""
import sys
sys.path.append({str(Path(precompile.__file__).with_name("base") / "cpu_stubs")!r})
from gpu_scheduler.engines.sglang import precompile
from gpu_scheduler.engines.sglang.policy import jit
modules = jit.needed({{"num_attention_heads": 4, "hidden_size": 512, "dtype": "bfloat16"}}, 1)
make = precompile.import_sglang((9, 0), modules)
from sglang.kernels.jit.utils.compile import ninja
asked = []
def refuse(*, spec, build_dir, build_file):
    asked.append((spec.module_name, "sm_90a" in build_file, str(build_dir).startswith({str(tmp_path)!r})))
    raise RuntimeError("written down")
ninja.build = refuse
done = precompile.Done(precompile.cache_folder(precompile.os.environ), "x")
assert precompile.compile_all(modules, make, done, lambda said: None) == len(modules)
for name, *facts in sorted(asked):
    print(name, *facts)
"""
    environment = os.environ | {"SGLANG_JIT_CACHE_DIR": str(tmp_path), "PYTHONWARNINGS": "ignore"}
    out = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert out.returncode == 0, out.stderr
    assert out.stdout.splitlines() == [
        "sgl_kernel_jit_activation_bf16_t_true True True",
        "sgl_kernel_jit_clamp_position_int64_t True True",
        "sgl_kernel_jit_fused_rope_true_128_true_bf16_t_bf16_t True True",
        "sgl_kernel_jit_kvcache_1024_1024_64_true True True",
    ]
