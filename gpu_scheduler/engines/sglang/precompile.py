"""`python -m gpu_scheduler.engines.sglang.precompile CATALOGUE` compiles the modules that the models of a catalogue
need from nvcc before an engine needs them, several at a time; an engine would compile one after another while requests
wait. Engines find them where SGLang keeps compiled modules: in SGLANG_JIT_CACHE_DIR, or in SGLang's own default folder.

The program reports on standard output as lines of JSON: first {"of": N}, the number of modules to compile, then one
line for each. The program takes no memory of a GPU: it asks NVML for the GPU's architecture and passes that on to
torch. The modules that it has compiled are listed in a file beside them, so that the next run need not import anything
to find that out.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
import tomllib
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from importlib import import_module, metadata
from pathlib import Path
from typing import Any

from gpu_scheduler.engines.sglang.policy import jit
from gpu_scheduler.engines.sglang.policy.jit import JitModule

_LIST = "prism-compiled.json"
_AT_ONCE = 4
"""Modules that are compiled at a time; each compiler takes a core and a GB of memory."""
Say = Callable[[Mapping[str, Any]], None]
"""Writes one report, as a mapping that JSON can hold."""


def of_catalogue(path: Path) -> set[JitModule]:
    """Modules that the models of a catalogue need, as far as SGLang serves them. A model that cannot be read is left
    out: its loader reports why. Raises OSError or ValueError if the catalogue itself cannot be read."""
    found: set[JitModule] = set()
    for listed in tomllib.loads(path.read_text()).get("model", []):
        try:
            folder = path.parent / os.path.expanduser(listed["path"])
            config = json.loads((folder / "config.json").read_text())
            if listed.get("engine", "") in ("", "sglang"):
                found |= jit.needed(config, int(listed.get("devices", 1)))
        except (OSError, ValueError, TypeError, KeyError, AttributeError):
            continue
    return found


def cache_folder(environment: Mapping[str, str]) -> Path:
    """Folder in which SGLang keeps compiled modules."""
    return Path(environment.get("SGLANG_JIT_CACHE_DIR") or "~/.cache/sglang/jit").expanduser()


class Done:
    """The list of modules compiled so far, kept as a file in a folder; each is listed with the versions and the GPU
    architecture that it was compiled for (`made_for`)."""

    def __init__(self, folder: Path, made_for: str) -> None:
        self._path = folder / _LIST
        self._made_for = made_for
        try:
            self._keys = set(json.loads(self._path.read_text()))
        except (OSError, ValueError, TypeError):
            self._keys = set()

    def _key(self, module: JitModule) -> str:
        return f"{self._made_for}: {module}"

    def missing(self, modules: Iterable[JitModule]) -> list[JitModule]:
        """The modules that are not listed, sorted."""
        return sorted(module for module in modules if self._key(module) not in self._keys)

    def add(self, module: JitModule) -> None:
        """Lists a module and writes the file, which is replaced as a whole."""
        self._keys.add(self._key(module))
        self._path.parent.mkdir(parents=True, exist_ok=True)
        half = self._path.with_name(f"{_LIST}.{os.getpid()}")
        half.write_text(json.dumps(sorted(self._keys), indent=1))
        half.replace(self._path)


def compile_all(modules: Collection[JitModule], make: Callable[[JitModule], object], done: Done, say: Say) -> int:
    """Makes each of `modules` and reports each with `say`. Returns how many could not be made."""
    failed = 0
    began = time.monotonic()
    with ThreadPoolExecutor(min(_AT_ONCE, os.cpu_count() or 1)) as pool:
        making = {pool.submit(make, module): module for module in modules}
        for each in as_completed(making):
            told: dict[str, Any] = {"kernel": str(making[each])}
            if (error := each.exception()) is None:
                done.add(making[each])
            else:
                failed += 1
                told["error"] = _one_line(error)
            say({**told, "seconds": round(time.monotonic() - began, 1)})
    return failed


def _one_line(error: BaseException) -> str:
    """The first line of a compiler's output that says "error", or else its first line; at most 300 characters."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [repr(error)]
    return next((line for line in lines if "error" in line.lower()), lines[0])[:300]


def architecture() -> tuple[int, int]:
    """Architecture of the first GPU, such as (9, 0). Raises OSError if there is none."""
    try:
        from balloond.backends import cuda_hardware
    except ImportError as error:
        raise OSError(f"this environment is without CUDA ({error})") from None
    return cuda_hardware.architecture()


def _version(distribution: str) -> str:
    """Name and version of an installed distribution, for the list."""
    try:
        return f"{distribution} {metadata.version(distribution)}"
    except metadata.PackageNotFoundError:  # unpacked without its metadata
        return distribution


def import_sglang(architecture: tuple[int, int], modules: Iterable[JitModule]) -> Callable[[JitModule], object]:
    """A function that compiles one of `modules` for a GPU of this architecture. Torch is told the architecture, because
    it might make a CUDA context to find it out."""
    import torch

    torch.cuda.current_device = lambda: 0
    torch.cuda.get_device_capability = lambda device=None: architecture
    import tvm_ffi  # noqa: F401 (imported here, since several threads at once must not)
    from sglang.kernels.jit.utils import get_jit_cuda_arch

    get_jit_cuda_arch()  # remembers its answer

    for module in modules:
        import_module(module.path)

    def make(module: JitModule) -> object:
        given = [getattr(torch, each) if isinstance(each, str) else each for each in module.arguments]
        return getattr(import_module(module.path), module.function)(*given)

    return make


def main(arguments: Sequence[str] | None = None) -> int:
    """Compiles the modules that the catalogue's models need and that are not compiled yet. Returns 0 on success, 1 if
    something failed."""
    parser = argparse.ArgumentParser("gpu_scheduler.engines.sglang.precompile", description=__doc__.splitlines()[0])
    parser.add_argument("catalogue", type=Path, help="file of models, as a loader reads it")
    given = parser.parse_args(arguments)

    def say(what: Mapping[str, Any]) -> None:
        print(json.dumps(what), flush=True)

    try:
        modules, found = of_catalogue(given.catalogue), architecture()
    except (OSError, ValueError) as error:
        say({"error": str(error)})
        return 1
    made_for = (_version("sglang"), _version("torch"), _version("apache-tvm-ffi"), "{}.{}".format(*found))
    done = Done(cache_folder(os.environ), ", ".join(made_for))
    missing = done.missing(modules)
    say({"of": len(missing)})
    if not missing:
        return 0
    try:
        make = import_sglang(found, missing)
    except Exception as error:  # anything in SGLang may fail at import; engines will report more
        say({"error": f"SGLang cannot be imported: {_one_line(error)}"})
        return 1
    return 1 if compile_all(missing, make, done, say) else 0


if __name__ == "__main__":
    sys.exit(main())
