"""The tree's rules, checked."""

import ast
import functools
import importlib.metadata
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = (
    "services",
    "balloond",
    "loader",
    "gpu_scheduler",
    "placement",
    "gateway",
    "kv_kinds",
    "tokenization",
    "prismctl",
    "deploy",
    "sim",
)
FILES = [
    path for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py")) if "cpu_stubs" not in path.parts
]
PURE = [
    f"balloond/driver/kv/{name}.py"
    for name in ("address_map", "growth", "reclaims", "reserve", "stretch", "watermarks")
]
PURE += ["kv_kinds/layout.py"]
POLICIES = [path for path in FILES if {"policy", "sharing"} & {*path.parts}] + [ROOT / path for path in PURE]
FORBIDDEN_IN_POLICY = {
    "grpc",
    "torch",
    "asyncio",
    "socket",
    "time",
    "random",
    "threading",
    "subprocess",
    "protos",
    "sglang",
}


def module(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module(path) for path in FILES}


@functools.cache
def imports(path: Path) -> set[str]:
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    return found


@pytest.mark.parametrize("path", POLICIES, ids=module)
def test_a_policy_names_no_io_clock_or_transport(path):
    assert {name.split(".")[0] for name in imports(path)} & FORBIDDEN_IN_POLICY == set()


def test_policies_imported_alone_pull_in_no_grpc_and_no_torch():
    code = "import sys\n" + "".join(f"import {module(path)}\n" for path in POLICIES)
    code += "print(sorted({'grpc', 'torch', 'protos', 'sglang'} & set(sys.modules)))"
    out = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"


def test_the_shared_services_package_imports_no_service():
    for path in FILES:
        if path.relative_to(ROOT).parts[0] == "services":
            tops = {name.split(".")[0] for name in imports(path)}
            assert not tops & (set(PACKAGES) - {"services"}), path


def test_the_shared_services_package_imports_no_message_of_the_services():
    for path in FILES:
        if path.relative_to(ROOT).parts[0] == "services":
            assert "protos" not in {name.split(".")[0] for name in imports(path)}, path


def test_every_import_of_the_trees_own_finds_its_module_even_inside_functions():
    """Functions of hooks and benchmarks import what only a GPU's run reaches."""
    tops = (*PACKAGES, "testing", "tests", "benchmarks")
    absent = {
        f"{path.relative_to(ROOT)}: {name}"
        for top in tops
        for path in (ROOT / top).rglob("*.py")
        for name in imported_from(path)
        if name.split(".")[0] in tops and not is_there(name)
    }
    assert not is_there("kv_kinds.no_such_module") and is_there("kv_kinds.layout")
    assert absent == set()


def imported_from(path: Path) -> set[str]:
    """Names of the modules that a file imports, or imports something from."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            found.add(node.module)
    return found


@functools.cache
def is_there(name: str) -> bool:
    """Whether the tree has a module, or a folder of modules, of this name."""
    path = ROOT / name.replace(".", "/")
    return path.is_dir() or path.with_suffix(".py").is_file()


def test_what_starts_a_system_imports_nothing_of_the_command_that_looks_at_one():
    for path in FILES:
        if path.relative_to(ROOT).parts[0] == "deploy":
            assert "prismctl" not in {name.split(".")[0] for name in imports(path)}, path


def test_modules_do_not_import_each_other_in_a_circle_even_inside_functions_or_for_types():
    """A circle is read as one file, wherever it is imported."""
    arrows = {module(path): imported_modules(path) for path in FILES}
    assert circles({"a": {"b"}, "b": {"c"}, "c": {"a"}, "d": {"a"}}) == [{"a", "b", "c"}]
    assert circles(arrows) == []


ROOMS = {
    "services": ("wording", "telemetry", "runtime", "ipc", "rpc"),
    "balloond": ("policy", "backends", "driver", "keeper", "node", "wire"),
    "balloond.driver": ("connection", "kv"),
    "loader": ("policy", "checkpoints", "catalogue", "transfers", "copies", "images"),
    "gpu_scheduler": ("telemetry", "policy", "engines", "memory", "queue", "residency", "report"),
    "gpu_scheduler.policy": ("queue", "memory", "throttle"),
    "gpu_scheduler.engines.sglang": (
        "base",
        "policy",
        "ranks",
        "memory",
        "kv",
        "weights",
        "sampling",
        "grammar",
        "model",
        "step",
        "hooks",
    ),
    "placement": ("policy", "cluster", "planning", "actuation"),
    "placement.policy": ("lifecycle", "assignment"),
    "deploy": ("monitoring", "hub", "node", "local"),
    "gateway": (
        *("policy", "schemas", "http", "access", "tools", "text", "parsing", "routing"),
        *("openai", "anthropic", "admin", "ui"),
    ),
}
"""Rooms of each package, lowest first: a file imports from its own room, and from those before it."""


@pytest.mark.parametrize("package", ROOMS)
def test_a_room_imports_only_rooms_below_it(package):
    order = ROOMS[package]
    for path in FILES:
        own = room(package, module(path))
        if own not in order:
            continue
        for name in imported_modules(path):
            other = room(package, name)
            # A pure part of the engines, which is lower than any policy.
            if other in order and not name.startswith("gpu_scheduler.engines.sharing."):
                assert order.index(other) <= order.index(own), f"{module(path)} imports {name}"


def test_rooms_of_every_package_have_their_place_in_the_order():
    for package, order in ROOMS.items():
        folders = (path.parent for path in FILES if path.name == "__init__.py")
        there = {room(package, ".".join(folder.relative_to(ROOT).parts)) for folder in folders}
        assert there - {""} == set(order), package


def room(package: str, name: str) -> str:
    """The room of a package that a module is in; empty where it is in none."""
    if not name.startswith(package + "."):
        return ""
    first = name.removeprefix(package + ".").partition(".")[0]
    return first if (ROOT / package.replace(".", "/") / first).is_dir() else ""


def imported_modules(path: Path) -> set[str]:
    """Modules of the tree that a file imports, anywhere in it; of a package, the module that is meant."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        for name in names:
            while name and name not in MODULES:
                name = name.rpartition(".")[0]
            found.add(name)
    return found - {"", module(path)}


def circles(arrows: dict[str, set[str]]) -> list[set[str]]:
    """Sets of more than one node that reach each other (strongly connected components; Kosaraju)."""
    backwards: dict[str, set[str]] = {node: set() for node in arrows}
    for node, targets in arrows.items():
        for target in targets:
            backwards[target].add(node)
    order: list[str] = []
    seen: set[str] = set()
    for node in arrows:
        visit(node, arrows, seen, order.append)
    found, seen = [], set()
    for node in reversed(order):
        together: set[str] = set()
        visit(node, backwards, seen, together.add)
        if len(together) > 1:
            found.append(together)
    return found


def visit(node: str, arrows: dict[str, set[str]], seen: set[str], leave: Callable[[str], object]) -> None:
    """Calls `leave` of each node that is reached and was not seen, those that it reaches first."""
    todo = [(node, iter(sorted(arrows[node])))] if node not in seen else []
    seen.add(node)
    while todo:
        here, targets = todo[-1]
        target = next((each for each in targets if each not in seen), None)
        if target is None:
            leave(here)
            todo.pop()
        else:
            seen.add(target)
            todo.append((target, iter(sorted(arrows[target]))))


OF_ENGINES = {"torch", "transformers", "cuda", "pynvml", "gguf"}
"""Libraries that come with the engine, and that others than engines import only where one is."""


def test_libraries_that_services_import_are_among_the_base_requirements():
    """Those are what a wheel depends on; an engine's come with `prism install`."""
    listed = {re.split("[=<>]", line)[0] for line in (ROOT / "requirements" / "base.txt").read_text().splitlines()}
    there = {re.sub("[-_.]+", "-", name).lower() for name in listed}
    distributions = importlib.metadata.packages_distributions()
    known = {*PACKAGES, "protos", *sys.stdlib_module_names, *OF_ENGINES}
    for path in FILES:
        if path.is_relative_to(ROOT / "gpu_scheduler" / "engines" / "sglang"):
            continue
        for top in {name.split(".")[0] for name in imports(path)} - known:
            found = {re.sub("[-_.]+", "-", name).lower() for name in distributions.get(top, ())}
            assert found & there, f"{module(path)} imports {top}"


@pytest.mark.parametrize("package", ["tokenization", "kv_kinds"])
def test_a_package_that_several_services_share_imports_no_service(package):
    for path in FILES:
        if path.relative_to(ROOT).parts[0] == package:
            tops = {name.split(".")[0] for name in imports(path)}
            assert not tops & (set(PACKAGES) - {"services", package}), path


def test_a_service_imports_another_only_through_its_client():
    services = ("balloond", "loader", "gpu_scheduler", "placement", "gateway")
    for path in FILES:
        own = path.relative_to(ROOT).parts[0]
        if own not in services:
            continue
        for name in imports(path):
            top, *rest = name.split(".")
            if top in services and top != own:
                in_engine = "engines" in path.parts and name.startswith(("balloond.driver", "balloond.backends"))
                in_copy = "transfers" in path.parts and name.startswith("balloond.backends")
                through_client = rest[:1] == ["client"] or rest[:2] == ["keeper", "client"]
                assert through_client or in_engine or in_copy, f"{module(path)} imports {name}"


def test_the_scheduler_imports_the_kinds_of_engines_and_no_engine():
    for path in FILES:
        own = path.relative_to(ROOT).parts
        engine = own[:2] == ("gpu_scheduler", "engines") and own[2:3] in (("sglang",), ("echo",), ("kinds.py",))
        if own[0] != "gpu_scheduler" or engine:
            continue
        for name in imported_modules(path):
            assert not name.startswith(("gpu_scheduler.engines.sglang", "gpu_scheduler.engines.echo")), path


def test_tests_and_benchmarks_do_not_import_each_other_and_no_package_imports_them():
    apart = {"tests": "benchmarks", "benchmarks": "tests", "testing": "tests|benchmarks"}
    for own, others in apart.items():
        for path in (ROOT / own).rglob("*.py"):
            found = {name.split(".")[0] for name in imports(path)}
            assert not found & set(others.split("|")), path
    for path in FILES:
        assert not {name.split(".")[0] for name in imports(path)} & {"testing", "tests", "benchmarks"}, path


def test_public_classes_have_distinct_names():
    found: dict[str, list[str]] = {}
    for path in FILES:
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                found.setdefault(node.name, []).append(module(path))
    assert {name: modules for name, modules in found.items() if len(modules) > 1} == {}


def test_the_simulator_uses_only_its_own_clock_and_of_services_only_policies_and_settings():
    for path in FILES:
        if path.relative_to(ROOT).parts[0] != "sim":
            continue
        found = imports(path)
        tops = {name.split(".")[0] for name in found}
        assert not tops & {"asyncio", "threading", "socket", "grpc", "protos"}, module(path)
        assert "time" not in tops or module(path) == "sim.replay", (
            f"{module(path)} has a clock"
        )  # it tells how long it took
        for name in found:
            top, *rest = name.split(".")
            if top in ("balloond", "loader", "gpu_scheduler", "placement", "gateway"):
                decides = rest[0] in ("policy", "config") or rest[:2] == ["engines", "sharing"]
                assert decides, f"{module(path)} imports {name}"


@pytest.mark.parametrize(
    ("library", "where"),
    [
        ("transformers", r"^(gpu_scheduler/engines/sglang/|tokenization/)"),
        ("sglang", r"^gpu_scheduler/engines/sglang/"),
        (
            "torch",
            r"^(gpu_scheduler/engines/sglang/|balloond/driver/|balloond/backends/|loader/transfers/|"
            r"deploy/local/smollm2/hf_folder)",  # a process of its own
        ),
        ("cuda", r"^(balloond/backends/|loader/transfers/)"),
        ("pynvml", r"^balloond/backends/"),
        ("starlette", r"^gateway/"),
        ("huggingface_hub", r"^deploy/hub/"),  # the loader knows no network
    ],
)
def test_heavy_libraries_are_imported_only_where_the_design_says(library, where):
    for path in FILES:
        if library in {name.split(".")[0] for name in imports(path)}:
            assert re.match(where, str(path.relative_to(ROOT))), f"{path} imports {library}"
