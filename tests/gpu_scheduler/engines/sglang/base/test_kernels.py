"""SGLang's kernels that must not be compiled in the middle of serving."""

from __future__ import annotations

import ast
import sys
import threading
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from gpu_scheduler.engines.sglang.base import kernels
from protos import engine_pb2


def sglang_folder() -> Path:
    package = find_spec("sglang")
    assert package is not None and package.submodule_search_locations
    return Path(package.submodule_search_locations[0])


def functions(text: str) -> dict[str, ast.FunctionDef]:
    return {each.name: each for each in ast.walk(ast.parse(text)) if isinstance(each, ast.FunctionDef)}


@pytest.mark.parametrize(("module", "name"), list(kernels.NUMBERS))
def test_sglang_kernels_take_their_changing_numbers_as_plain_arguments(module: str, name: str) -> None:
    path = sglang_folder().joinpath(*module.split(".")[1:]).with_suffix(".py")
    found = functions(path.read_text())
    taken = {argument.arg: argument.annotation for argument in found[name].args.args}
    assert all(taken[number] is None for number in kernels.NUMBERS[module, name]), "no constants"
    # It is looked up in its own module when it is launched, so that is where another one is put.
    launched = [each for each in found.values() if f"{name}[" in ast.unparse(each)]
    assert launched


def test_batch_sizes_that_are_served_share_one_kernel_constant() -> None:
    assert {kernels.batch_constant(batch) for batch in range(1, 257)} == {256}
    assert kernels.batch_constant(257) == 512


class FakeCompilers:
    """tvm-ffi and Triton as far as `Compilations` knows them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.built: list[str] = []
        self.failure: Exception | None = None
        self.knobs = SimpleNamespace(compilation=SimpleNamespace(listener=None))
        self.cpp = SimpleNamespace(load_inline=self._load, load=self._load)
        monkeypatch.setitem(sys.modules, "triton", SimpleNamespace(knobs=self.knobs))
        monkeypatch.setitem(sys.modules, "tvm_ffi", SimpleNamespace(cpp=self.cpp))

    def _load(self, name: str, **more: Any) -> str:
        self.built.append(name)
        if self.failure is not None:
            raise self.failure
        return f"the module {name}"

    def triton(self, name: str, seconds: float, *, cache_hit: bool = False) -> None:
        times = SimpleNamespace(total=round(1e6 * seconds))
        self.knobs.compilation.listener(src=SimpleNamespace(name=name), times=times, cache_hit=cache_hit, metadata={})


@pytest.fixture
def compilers(monkeypatch: pytest.MonkeyPatch) -> FakeCompilers:
    return FakeCompilers(monkeypatch)


def watched() -> list[engine_pb2.Compiling]:
    """What is told from now on."""
    told: list[engine_pb2.Compiling] = []
    kernels.Compilations(told.append).watch()
    return told


JIT = "sgl_kernel_jit_activation_bf16_t_true_d7a1a1d3c2eb337c"


def test_nvcc_compilation_is_reported_when_it_begins_and_when_it_is_done(compilers: FakeCompilers) -> None:
    told = watched()
    assert compilers.cpp.load_inline(JIT, cuda_sources=[]) == f"the module {JIT}" and compilers.built == [JIT]
    first, last = told
    assert (first.kernel, first.compiler, first.done) == ("activation_bf16_t_true", "nvcc", False)
    assert (last.kernel, last.compiler, last.done) == ("activation_bf16_t_true", "nvcc", True) and last.seconds >= 0


def test_failed_compilation_is_reported_as_done_and_its_error_reaches_sglang(compilers: FakeCompilers) -> None:
    told = watched()
    compilers.failure = RuntimeError("ninja exited with status 1")
    with pytest.raises(RuntimeError, match="ninja"):
        compilers.cpp.load(JIT)
    assert [each.done for each in told] == [False, True]


def test_triton_compilation_is_reported_and_a_cache_hit_is_not(compilers: FakeCompilers) -> None:
    told = watched()
    compilers.triton("alloc_extend_kernel", 0.5)
    compilers.triton("alloc_decode_kernel", 0.5, cache_hit=True)
    assert [(each.kernel, each.compiler, each.done, each.seconds) for each in told] == [
        ("alloc_extend_kernel", "triton", True, 0.5)
    ]


def test_compilation_reports_of_other_threads_are_sent_by_one_thread(compilers: FakeCompilers) -> None:
    threads: list[int] = []
    told: list[engine_pb2.Compiling] = []

    def send(message: engine_pb2.Compiling) -> None:
        threads.append(threading.get_ident())
        told.append(message)

    kernels.Compilations(send).watch()
    other = threading.Thread(target=compilers.cpp.load_inline, args=(JIT,))
    other.start()
    other.join()
    assert not told
    compilers.triton("alloc_extend_kernel", 0.5)
    assert [each.kernel for each in told] == ["activation_bf16_t_true", "alloc_extend_kernel"]
    assert set(threads) == {threading.get_ident()}


def test_sglang_imports_its_compiler_from_where_compilations_are_watched() -> None:
    text = (sglang_folder() / "jit_kernel" / "utils" / "compile.py").read_text()
    assert "from tvm_ffi.cpp import load, load_inline" in ast.unparse(functions(text)["load_jit"])
