"""`python -m gpu_scheduler.engines.sglang.precompile CATALOGUE`: what nvcc has to compile for the models of a catalogue
is compiled before an engine needs it, several modules at a time; an engine would compile one after another while
requests wait. Engines find it where it comes to lie: in TVM_FFI_CACHE_DIR, or where tvm-ffi keeps such things.

It says what it does as lines of JSON: {"of": N} first, how many modules there are to be compiled, then one for each. It
takes no memory of a GPU: its architecture is asked of NVML, and torch is told that. What was compiled here is written
down beside it, so that the next time nothing is imported to find that out.
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
"""A compiler takes a core, and a GB of memory."""
Say = Callable[[Mapping[str, Any]], None]


def of_catalogue(path: Path) -> set[JitModule]:
    """What the models of a catalogue need that SGLang serves; one that cannot be read is left out: its loader says
    why. Raises OSError, ValueError."""
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
    """Where tvm-ffi keeps what was compiled."""
    return Path(environment.get("TVM_FFI_CACHE_DIR") or "~/.cache/tvm-ffi").expanduser()


class Done:
    """What was compiled, as is written down in a folder: by versions, architecture and module."""

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
        return sorted(module for module in modules if self._key(module) not in self._keys)

    def add(self, module: JitModule) -> None:
        self._keys.add(self._key(module))
        self._path.parent.mkdir(parents=True, exist_ok=True)
        half = self._path.with_name(f"{_LIST}.{os.getpid()}")
        half.write_text(json.dumps(sorted(self._keys), indent=1))
        half.replace(self._path)


def compile_all(modules: Collection[JitModule], make: Callable[[JitModule], object], done: Done, say: Say) -> int:
    """Makes them, and says so of each; how many could not be made."""
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
    """Of a compiler's output the first line that says error."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [repr(error)]
    return next((line for line in lines if "error" in line.lower()), lines[0])[:300]


def architecture() -> tuple[int, int]:
    """Of the first GPU, as (9, 0). Raises OSError where there is none."""
    try:
        from balloond.backends import cuda_hardware
    except ImportError as error:
        raise OSError(f"this environment is without CUDA ({error})") from None
    return cuda_hardware.architecture()


def _version(distribution: str) -> str:
    try:
        return f"{distribution} {metadata.version(distribution)}"
    except metadata.PackageNotFoundError:  # unpacked without what says it
        return distribution


def import_sglang(architecture: tuple[int, int], modules: Iterable[JitModule]) -> Callable[[JitModule], object]:
    """What makes one of these modules for a GPU of this architecture. Asked for that, torch might make a context."""
    import torch

    torch.cuda.current_device = lambda: 0
    torch.cuda.get_device_capability = lambda device=None: architecture
    from sglang.jit_kernel.utils import get_jit_cuda_arch

    # SGLang sets it for each module and takes it away again, and several threads do so at once.
    os.environ["TVM_FFI_CUDA_ARCH_LIST"] = get_jit_cuda_arch().target_name
    import tvm_ffi.cpp  # noqa: F401  (as the others: not by several threads at once)

    for module in modules:
        import_module(module.path)

    def make(module: JitModule) -> object:
        given = [getattr(torch, each) if isinstance(each, str) else each for each in module.arguments]
        return getattr(import_module(module.path), module.function)(*given)

    return make


def main(arguments: Sequence[str] | None = None) -> int:
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
    made_for = (_version("sglang"), _version("apache-tvm-ffi"), "{}.{}".format(*found))
    done = Done(cache_folder(os.environ), ", ".join(made_for))
    missing = done.missing(modules)
    say({"of": len(missing)})
    if not missing:
        return 0
    try:
        make = import_sglang(found, missing)
    except Exception as error:  # of SGLang's whole world: engines will say more
        say({"error": f"SGLang cannot be imported: {_one_line(error)}"})
        return 1
    return 1 if compile_all(missing, make, done, say) else 0


if __name__ == "__main__":
    sys.exit(main())
