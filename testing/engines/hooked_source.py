"""`python -m testing.engines.hooked_source OLD NEW` compares two versions of SGLang where our engine takes hold in it:
it prints how the source of every hooked function, and of every method that a class of ours overrides, has changed from
one wheel to the other. A signature that stayed says little: most of these functions have another body in each release.

OLD and NEW are wheels (`pip download --no-deps sglang==VERSION`) or folders in which one is unpacked. The program runs
in an environment with the engine, of either version.
"""

from __future__ import annotations

import argparse
import ast
import difflib
import sys
import zipfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

Read = Callable[[str], str | None]
"""Text of a file of the package by its path, such as "sglang/srt/environ.py"; None: there is none."""


def source_of(where: Path) -> Read:
    """Reads files of a wheel, or of a folder in which one is unpacked."""
    if where.is_dir():
        return lambda path: (where / path).read_text() if (where / path).is_file() else None
    wheel = zipfile.ZipFile(where)
    names = set(wheel.namelist())
    return lambda path: wheel.read(path).decode() if path in names else None


def body(read: Read, target: str) -> str | None:
    """Source of the function or class with this full name, which the name's module defines or imports by `from`; None:
    neither."""
    parts = target.split(".")
    for length in range(len(parts) - 1, 0, -1):
        for path in ("/".join(parts[:length]) + ".py", "/".join([*parts[:length], "__init__.py"])):
            if (text := read(path)) is not None:
                return _defined(text, parts[length:]) or _imported(read, text, parts[length:])
    return None


def _defined(text: str, names: list[str]) -> str | None:
    scope: list[ast.stmt] = ast.parse(text).body
    found: ast.stmt | None = None
    for name in names:
        kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
        found = next((each for each in flat(scope) if isinstance(each, kinds) and each.name == name), None)
        if found is None:
            return None
        scope = found.body
    assert found is not None
    return ast.get_source_segment(text, found)


def _imported(read: Read, text: str, names: list[str]) -> str | None:
    for each in flat(ast.parse(text).body):
        if isinstance(each, ast.ImportFrom) and each.level == 0:
            for alias in each.names:
                if (alias.asname or alias.name) == names[0]:
                    return body(read, ".".join([str(each.module), alias.name, *names[1:]]))
    return None


def flat(statements: Iterable[ast.AST]) -> Iterator[ast.AST]:
    """Statements with those inside `if` and `try`."""
    for each in statements:
        yield each
        if isinstance(each, (ast.If, ast.Try, ast.ExceptHandler)):
            for inner in ("body", "handlers", "orelse", "finalbody"):
                yield from flat(getattr(each, inner, ()))


def compare(targets: Iterable[str], old: Read, new: Read) -> Iterator[str]:
    """Lines that say how each target has changed. A target that has not changed has none."""
    for target in targets:
        before, after = body(old, target), body(new, target)
        if after is None:
            yield f"== {target}: {'in neither' if before is None else 'GONE'}"
        elif before != after:
            yield f"== {target}" + (": NEW" if before is None else "")
            yield from difflib.unified_diff((before or "").splitlines(), after.splitlines(), "old", "new", lineterm="")


def targets() -> list[str]:
    """Full names of all functions and methods that the engine hooks or overrides."""
    from gpu_scheduler.engines.sglang import plugin

    found = {hook.target for hook in plugin.all_hooks()}
    for each in plugin.all_overriding():
        found |= set(plugin.overridden(each).values())
    return sorted(found)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("old", type=Path, help="wheel or folder of the version that the hooks were made for")
    parser.add_argument("new", type=Path, help="wheel or folder of the next version")
    given = parser.parse_args(arguments)
    from gpu_scheduler.engines.sglang.base import environment

    environment.prepare()
    for line in compare(targets(), source_of(given.old), source_of(given.new)):
        print(line)
    return 0


if __name__ == "__main__":
    sys.exit(main())
