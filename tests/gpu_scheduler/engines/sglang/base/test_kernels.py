"""SGLang's kernels that must not be compiled in the middle of serving."""

from __future__ import annotations

import ast
import sys
import threading
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType, SimpleNamespace
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
def test_sglang_kernels_can_take_their_changing_numbers_as_plain_arguments(module: str, name: str) -> None:
    path = sglang_folder().joinpath(*module.split(".")[1:]).with_suffix(".py")
    found = functions(path.read_text())
    taken = {argument.arg: argument.annotation for argument in found[name].args.args}
    for number in kernels.NUMBERS[module, name]:
        if (annotation := taken[number]) is None or "constexpr" not in ast.unparse(annotation):
            continue
        # Numbers that are only compared with others need not be constants.
        compared = [each for each in ast.walk(found[name]) if isinstance(each, ast.Compare)]
        inside = [each for compare in compared for each in ast.walk(compare)]
        uses = [each for each in ast.walk(found[name]) if isinstance(each, ast.Name) and each.id == number]
        assert uses and all(any(use is each for each in inside) for use in uses), number
    # It is looked up in its own module when it is launched, so that is where another one is put.
    launched = [each for each in found.values() if f"{name}[" in ast.unparse(each)]
    assert launched


class Triton(ModuleType):
    """Triton as far as `take_all_numbers` knows it."""

    def __init__(self) -> None:
        super().__init__("triton")
        self.language = SimpleNamespace(constexpr=type("constexpr", (), {}))
        self.made: dict[str, tuple[str, ...]] = {}

    def jit(self, function: Any, *, do_not_specialize: tuple[str, ...]) -> SimpleNamespace:
        self.made[function.__name__] = do_not_specialize
        return SimpleNamespace(fn=function)


def test_changing_numbers_that_sglang_declares_constant_become_plain_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    triton = Triton()
    monkeypatch.setitem(sys.modules, "triton", triton)

    def kernel(pointer, lines, batch, width): ...  # type: ignore[no-untyped-def]

    constant = triton.language.constexpr
    kernel.__annotations__ = {"lines": constant, "batch": int, "width": constant}
    there = ModuleType("there")
    there.kernel = SimpleNamespace(fn=kernel)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "there", there)
    monkeypatch.setattr(kernels, "NUMBERS", {("there", "kernel"): ("lines", "batch")})
    kernels.take_all_numbers()
    assert triton.made == {"kernel": ("lines", "batch")}
    assert there.kernel.fn.__annotations__ == {"batch": int, "width": constant}


def test_batch_sizes_that_are_served_share_one_kernel_constant() -> None:
    assert {kernels.batch_constant(batch) for batch in range(1, 257)} == {256}
    assert kernels.batch_constant(257) == 512


class FakeCompilers:
    """SGLang's compiler and Triton as far as `Compilations` knows them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.built: list[str] = []
        self.failure: Exception | None = None
        self.knobs = SimpleNamespace(compilation=SimpleNamespace(listener=None))
        self.ninja = SimpleNamespace(build=self._build)
        monkeypatch.setitem(sys.modules, "triton", SimpleNamespace(knobs=self.knobs))
        monkeypatch.setitem(sys.modules, "sglang.kernels.jit.utils.compile", SimpleNamespace(ninja=self.ninja))

    def _build(self, *, spec: Any, build_dir: str) -> str:
        self.built.append(spec.module_name)
        if self.failure is not None:
            raise self.failure
        return f"{build_dir}/{spec.module_name}"

    def nvcc(self, name: str) -> str:
        built: str = self.ninja.build(spec=SimpleNamespace(module_name=name), build_dir="here")
        return built

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


JIT = "sgl_kernel_jit_activation_bf16_t_true"


def test_nvcc_compilation_is_reported_when_it_begins_and_when_it_is_done(compilers: FakeCompilers) -> None:
    told = watched()
    assert compilers.nvcc(JIT) == f"here/{JIT}" and compilers.built == [JIT]
    first, last = told
    assert (first.kernel, first.compiler, first.done) == ("activation_bf16_t_true", "nvcc", False)
    assert (last.kernel, last.compiler, last.done) == ("activation_bf16_t_true", "nvcc", True) and last.seconds >= 0


def test_failed_compilation_is_reported_as_done_and_its_error_reaches_sglang(compilers: FakeCompilers) -> None:
    told = watched()
    compilers.failure = RuntimeError("ninja exited with status 1")
    with pytest.raises(RuntimeError, match="ninja"):
        compilers.nvcc(JIT)
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
    other = threading.Thread(target=compilers.nvcc, args=(JIT,))
    other.start()
    other.join()
    assert not told
    compilers.triton("alloc_extend_kernel", 0.5)
    assert [each.kernel for each in told] == ["activation_bf16_t_true", "alloc_extend_kernel"]
    assert set(threads) == {threading.get_ident()}


def test_sglang_finds_its_compiler_where_compilations_are_watched() -> None:
    folder = sglang_folder() / "kernels" / "jit" / "utils" / "compile"
    assert "ninja.build(spec=spec, " in ast.unparse(functions((folder / "loader.py").read_text())["load_jit"])
    arguments = functions((folder / "ninja.py").read_text())["build"].args
    assert [each.arg for each in arguments.kwonlyargs][0] == "spec" and not arguments.args
