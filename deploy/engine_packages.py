"""`prism install`: the engine's packages for this machine, pinned, beside what `pip install` of Prism itself brings.

They are no extras of the package: PyPI's torch brings CUDA, which a machine without a GPU has no use for, and some
packages fit only without what they name.

Uses the standard library alone, because `make env` runs it in an empty environment.
"""

from __future__ import annotations

import argparse
import importlib.util
import shlex
import subprocess
import sys
from dataclasses import dataclass

from deploy import places

REQUIREMENTS = places.TREE / "requirements"


@dataclass(frozen=True)
class EnginePackages:
    """An engine's packages for a kind of device."""

    torch: str
    index: str
    """Where torch is, if PyPI has only another build of it."""
    sizes: str
    """For people: what is fetched, and what it takes on disk."""


KINDS = {
    "cpu": EnginePackages(
        "torch==2.13.0+cpu", "https://download.pytorch.org/whl/cpu", "about 300 MB to fetch, 1.4 GB on disk"
    ),
    "cuda": EnginePackages("torch==2.14.1", "", "about 3.9 GB to fetch, 9 GB on disk, with CUDA 13's libraries"),
}


def steps(kind: str, torch: str = "") -> list[tuple[str, list[str]]]:
    """Steps of the installation in order: (what it installs, pip's arguments). `torch`: another build of torch, as
    a requirement or a file."""
    packages = KINDS[kind]
    index = ["--extra-index-url", packages.index] if packages.index and not torch else []
    base, engine, alone = (
        str(REQUIREMENTS / f"{name}.txt") for name in ("base", f"engine-{kind}", f"engine-{kind}-nodeps")
    )
    return [
        # Alone, so that nothing else is looked for where torch is.
        (torch or packages.torch, ["--no-deps", *index, torch or packages.torch]),
        ("libraries", [torch or packages.torch, "-r", base, "-r", engine]),
        ("SGLang, without the packages that it names and this engine does not need", ["--no-deps", "-r", alone]),
    ]


def missing(device: str) -> str | None:
    """One line that says how to install the engine for a device such as "cuda:0"; None if the environment has it."""
    absent = [name for name in ("torch", "sglang") if importlib.util.find_spec(name) is None]
    if not absent:
        return None
    kind = device.partition(":")[0] if device.partition(":")[0] in KINDS else "cpu"
    return (
        f"this environment has no engine ({' and '.join(absent)} missing): prism install {kind} ({KINDS[kind].sizes})"
    )


def main(arguments: list[str] | None = None, prog: str = "python -m deploy.engine_packages") -> int:
    parser = argparse.ArgumentParser(
        prog=prog, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    sizes = "; ".join(f"{kind}: {packages.sizes}" for kind, packages in KINDS.items())
    parser.add_argument("kind", choices=tuple(KINDS), help=sizes)
    parser.add_argument("--torch", default="", help="another build of torch: a requirement, or the path of a wheel")
    parser.add_argument("--print", action="store_true", dest="only_print", help="print pip's command lines, run none")
    options = parser.parse_args(arguments)
    if importlib.util.find_spec("pip") is None and not options.only_print:
        print("prism: this environment has no pip; --print prints what another installer is to do", file=sys.stderr)
        return 1
    pip = [sys.executable, "-m", "pip", "install", "--disable-pip-version-check"]
    todo = steps(options.kind, options.torch)
    for number, (what, arguments_of_pip) in enumerate(todo, 1):
        if options.only_print:
            print(shlex.join([*pip, *arguments_of_pip]))
            continue
        size = f" ({KINDS[options.kind].sizes} in all)" if number == 1 else ""
        print(f"prism: {number}/{len(todo)} {what}{size}", flush=True)
        status = subprocess.run([*pip, "--quiet", *arguments_of_pip], check=False).returncode
        if status:
            hint = "; --torch (make env TORCH=) names another build of torch" if number == 1 else ""
            print(f"prism: pip ended with status {status}, and nothing else was installed{hint}", file=sys.stderr)
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
