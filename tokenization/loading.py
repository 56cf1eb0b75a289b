"""A folder's tokenizer, as SGLang's own server loads it."""

from __future__ import annotations

import contextlib
import errno
import gc
import json
import os
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from services.errors import Unmet
from tokenization import fidelity, repairs
from tokenization.tokenizer import Tokenizer

SETTINGS = "tokenizer_config.json"
_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt")
_LONGEST_WHY = 300
"""Characters of what a library says of a folder; some add a page of advice."""
_importing = threading.Lock()
"""Transformers fills its module in as names are asked for: two threads that import it at once may find it half
filled."""


class UnreadableNow(Unmet):
    """The folder cannot be read at the moment: a volume is away, memory or descriptors are short."""


def without_torch() -> None:
    """Lets transformers believe that torch is not installed, for the whole process. A process that runs no model saves
    three seconds of its start and 260 MiB of its memory by it. To be called before transformers is imported."""
    sys.modules.setdefault("torch", None)  # type: ignore[arg-type]
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")  # it would advise to install it


def load(path: str) -> Tokenizer:
    """The tokenizer of the folder at `path`. Takes about a second. Raises Unmet, in one line that does not name the
    folder, when it has none that can be used: none that can be read (UnreadableNow where that may pass), one whose chat
    template does not compile, or one that does other than its tokenizer.json."""
    folder = Path(path)
    try:
        found = _load(folder)
        tokenizer = Tokenizer(found)
        difference = fidelity.difference(tokenizer, folder)
    except Unmet:
        raise
    except BaseException as error:  # the libraries raise all kinds at a broken file, Rust's panics among them
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise _fault(error)(f"its tokenizer cannot be used: {_why(folder, error)}") from error
    if difference:
        raise Unmet(f"its tokenizer cannot be used: {difference}")
    # Transformers and vocabularies are some hundred thousand objects that stay: walking them in every full collection
    # would stop all streams for tens of milliseconds.
    gc.freeze()
    return tokenizer


def check_config(path: str) -> None:
    """Raises Unmet, in one line, for a config.json that transformers, and so SGLang, cannot read."""
    if not Path(path).is_dir():
        raise UnreadableNow("its folder is not there")
    with _importing:
        from transformers import AutoConfig

    try:
        AutoConfig.from_pretrained(path, local_files_only=True)
    except Exception as error:
        raise _fault(error)(f"its config.json cannot be used: {_line(Path(path), error)}") from error


def settings(folder: Path) -> Mapping[str, Any]:
    """tokenizer_config.json of a folder; empty where there is none. Raises ValueError for what is no JSON object."""
    try:
        told = json.loads((folder / SETTINGS).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except ValueError as error:
        raise ValueError(f"{SETTINGS} is not JSON: {error}") from None
    if not isinstance(told, dict):
        raise ValueError(f"{SETTINGS} is not a JSON object")
    return told


def _load(folder: Path) -> Any:
    """A tokenizer of transformers."""
    if not folder.is_dir():
        raise UnreadableNow("its folder is not there")
    if (folder / "tekken.json").is_file() and not (folder / "tokenizer.json").is_file():
        raise Unmet("its tokenizer is a tekken.json alone, which is not supported: add the checkpoint's tokenizer.json")
    with _importing:
        from transformers import AutoTokenizer

    told = settings(folder)
    options: dict[str, Any] = {"local_files_only": True, "clean_up_tokenization_spaces": False}
    if "fix_mistral_regex" not in told:
        # Nothing said, transformers warns of a pattern that it takes for a wrong one in every folder without a version
        # of its own in config.json. SGLang leaves the pattern as it is.
        options["fix_mistral_regex"] = False
    tokenizer = AutoTokenizer.from_pretrained(str(folder), **options)
    if type(tokenizer).__name__ == repairs.GENERIC_CLASS:
        kind = repairs.declared_class(told)
        if kind is not None and kind.__name__ != repairs.GENERIC_CLASS:
            with contextlib.suppress(OSError, ValueError, TypeError, ImportError):  # what AutoTokenizer made is used
                tokenizer = kind.from_pretrained(str(folder), **options)  # type: ignore[attr-defined]
    repairs.mend(tokenizer, folder, told)
    return tokenizer


def _fault(error: BaseException) -> type[Unmet]:
    """Whose fault it is, by what was raised first: libraries make other kinds of it on the way up."""
    seen = {id(error)}
    while (before := error.__cause__ or error.__context__) is not None and id(before) not in seen:
        seen.add(id(before))
        error = before
    passes = isinstance(error, MemoryError) or (isinstance(error, OSError) and error.errno not in (None, errno.ENOENT))
    return UnreadableNow if passes else Unmet


def _why(folder: Path, error: BaseException) -> str:
    """One line for what was wrong. Where the files are not there, transformers speaks of hubs and identifiers."""
    if not any((folder / name).is_file() for name in _FILES):
        return "there is no tokenizer.json or tokenizer.model in its folder"
    return _line(folder, error)


def _line(folder: Path, error: BaseException) -> str:
    """What a library said, in one line that does not name the place of the folder."""
    text = " ".join(str(error).split())[:_LONGEST_WHY] or type(error).__name__
    return text.replace(str(folder) + os.sep, "").replace(str(folder), "its folder")
