"""SGLang's kernels that must not be compiled in the middle of serving."""

from __future__ import annotations

import ast
from importlib.util import find_spec
from pathlib import Path

import pytest

from gpu_scheduler.engines.sglang import kernels


@pytest.mark.parametrize(("module", "name"), list(kernels.NUMBERS))
def test_sglang_has_the_kernels_and_the_numbers_that_change(module: str, name: str) -> None:
    package = find_spec("sglang")
    assert package is not None and package.submodule_search_locations
    path = Path(package.submodule_search_locations[0]).joinpath(*module.split(".")[1:]).with_suffix(".py")
    functions = {each.name: each for each in ast.walk(ast.parse(path.read_text())) if isinstance(each, ast.FunctionDef)}
    taken = {argument.arg: argument.annotation for argument in functions[name].args.args}
    assert all(taken[number] is None for number in kernels.NUMBERS[module, name]), "no constants"
    # It is looked up in its own module when it is launched, so that is where another one is put.
    launched = [each for each in functions.values() if f"{name}[" in ast.unparse(each)]
    assert launched


def test_batches_of_all_sizes_that_are_served_have_one_constant() -> None:
    assert {kernels.batch_constant(batch) for batch in range(1, 257)} == {256}
    assert kernels.batch_constant(257) == 512
