"""A check that SGLang has every name of it that our code imports. Code for GPUs is imported on a GPU at the earliest;
this check finds its names on any machine.

    python -m testing.engines.sglang_names

prints those that SGLang lacks.
"""

from __future__ import annotations

import ast
import importlib
import importlib.util
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from testing.engines.hooked_source import flat

ROOT = Path(__file__).parents[2]
FOLDERS = ("gpu_scheduler", "tokenization", "gateway", "loader", "deploy", "testing", "benchmarks", "tests")


@dataclass(frozen=True, order=True)
class Name:
    module: str
    name: str
    """Empty: only the module."""
    where: str

    def __str__(self) -> str:
        return f"{self.module}.{self.name}".rstrip(".") + f" ({self.where})"


def ours(folders: Iterable[str] = FOLDERS) -> set[Name]:
    """All names in our files, and attributes of modules that they import."""
    found: set[Name] = set()
    for folder in folders:
        for path in sorted((ROOT / folder).rglob("*.py")):
            where = str(path.relative_to(ROOT))
            if "sglang" in (text := path.read_text()):
                found |= {Name(module, name, where) for module, name in names(text)}
    return found


def names(text: str) -> Iterator[tuple[str, str]]:
    """(module, name) of each name that a file with this text imports of SGLang. An attribute of a module that it
    imports is a name too."""
    tree = ast.parse(text)
    modules: dict[str, str] = {}
    for each in ast.walk(tree):
        if isinstance(each, ast.ImportFrom) and _theirs(each.module):
            for alias in each.names:
                yield str(each.module), alias.name
                modules[alias.asname or alias.name] = f"{each.module}.{alias.name}"
        elif isinstance(each, ast.Import):
            for alias in each.names:
                if _theirs(alias.name):
                    yield alias.name, ""
                    modules[alias.asname or alias.name] = alias.name
    for each in ast.walk(tree):
        if isinstance(each, ast.Attribute) and (module := modules.get(ast.unparse(each.value))) and _is_module(module):
            yield module, each.attr


def _theirs(module: str | None) -> bool:
    return module is not None and (module == "sglang" or module.startswith("sglang."))


def _is_module(name: str) -> bool:
    path = _path(name)
    return path.is_dir() or path.with_suffix(".py").is_file()


def _path(module: str) -> Path:
    """The file or folder of one of SGLang's modules, without the suffix of a file. Nothing is imported to find it."""
    spec = importlib.util.find_spec("sglang")
    assert spec is not None and spec.origin is not None, "SGLang is not installed"
    return Path(spec.origin).parent.joinpath(*module.split(".")[1:])


def lacking(names: Iterable[Name]) -> list[Name]:
    """Names of these that SGLang does not have. A module that cannot be imported here, as it needs a GPU's packages, is
    searched for the names that it defines or imports."""
    return [each for each in sorted(names) if not _has(each.module, each.name)]


def _has(module: str, name: str) -> bool:
    if not _is_module(module):
        return False
    if not name or _is_module(f"{module}.{name}"):
        return True
    try:
        return hasattr(importlib.import_module(module), name)
    except Exception:  # whatever a missing GPU raises
        return name in _defined(module)


def _defined(module: str) -> set[str]:
    """Names that the module's source binds."""
    path = _path(module)
    text = (path / "__init__.py" if path.is_dir() else path.with_suffix(".py")).read_text()
    found: set[str] = set()
    for each in flat(ast.parse(text).body):
        if isinstance(each, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            found.add(each.name)
        elif isinstance(each, (ast.Import, ast.ImportFrom)):
            found |= {alias.asname or alias.name for alias in each.names}
        elif isinstance(each, (ast.Assign, ast.AnnAssign)):
            for target in each.targets if isinstance(each, ast.Assign) else [each.target]:
                found |= {node.id for node in ast.walk(target) if isinstance(node, ast.Name)}
    return found


def all_ours() -> set[Name]:
    """`ours`, and the names of kernels and modules that are compiled at run time, which our code has as text."""
    from gpu_scheduler.engines.sglang.base import kernels
    from gpu_scheduler.engines.sglang.policy import jit

    found = ours()
    found |= {Name(module, kernel, "base/kernels.py") for module, kernel in kernels.NUMBERS}
    compiled = [jit.clamp_position("int64"), jit.activation("bfloat16"), jit.rope(True, 64, "bfloat16")]
    for method in ("awq", "gptq"):
        config = {"quantization_config": {"quant_method": method}, "num_experts": 8}
        compiled += [jit.kvcache(256), *jit.quantised(config, "bfloat16")]
    return found | {Name(each.path, each.function, "policy/jit.py") for each in compiled}


def main() -> int:
    from gpu_scheduler.engines.sglang.base import environment

    environment.prepare()
    from gpu_scheduler.engines.sglang import engine  # noqa: F401  (SGLang's modules import each other in one order)

    missing = lacking(all_ours())
    for each in missing:
        print(each)
    return 1 if missing else 0


if __name__ == "__main__":
    sys.exit(main())
