"""A folder's tokenizer, as SGLang's own server loads it."""

from __future__ import annotations

import contextlib
import errno
import gc
import os
import sys
import threading
from collections.abc import Callable, Container, Mapping
from pathlib import Path
from typing import Any

from services.errors import Unmet, first_of_chain
from services.wording.json_values import ValueKind, fault
from tokenization import fidelity, files, repairs
from tokenization.files import UnreadableNow
from tokenization.tokenizer import Tokenizer

_FILES = (files.TOKENIZER, *files.OLDER_TOKENIZERS)
_LONGEST_WHY = 300
"""Most characters of what a library says of a folder that go into an error; some add a page of advice."""
_importing = threading.Lock()
"""Lock for importing transformers, which fills its module in as names are used: two threads that import it at once may
find it half filled."""


def without_torch() -> None:
    """Lets transformers believe that torch is not installed, for the whole process. A process that runs no model saves
    three seconds of its start and 260 MiB of its memory by it. To be called before transformers is imported."""
    sys.modules.setdefault("torch", None)  # type: ignore[arg-type]
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")  # transformers would advise to install torch


def load(path: str) -> Tokenizer:
    """The tokenizer of the folder at `path`. Takes about a second. Raises Unmet, in one line that does not name the
    folder, if there is none that can be used: it cannot be read (UnreadableNow where that may pass), its chat template
    does not compile or makes no prompt of the plainest chat, or it does other than its tokenizer.json."""
    folder = Path(path)
    told: Mapping[str, Any] = {}
    try:
        _check_folder(folder)
        told = files.settings(folder)
        files.check(folder, told)
        tokenizer = Tokenizer(_load(folder, told), files.template_places(folder))
        difference = fidelity.difference(tokenizer, folder)
    except Unmet:
        raise
    except BaseException as error:  # the libraries raise all kinds at a broken file, Rust's panics among them
        if not _is_fault(error):
            raise
        kind = _fault(error)
        why = _line(folder, error) if kind is UnreadableNow else _blamed(folder, told, error)
        raise kind(f"its tokenizer cannot be used: {why}") from error
    if difference:
        raise Unmet(f"its tokenizer cannot be used: {difference}")
    # Transformers and vocabularies are some hundred thousand objects that stay: walking them in every full collection
    # would stop all streams for tens of milliseconds.
    gc.freeze()
    return tokenizer


def check_config(path: str) -> None:
    """Raises Unmet, in one line, for a config.json that transformers, and so SGLang, cannot read."""
    folder = Path(path)
    try:
        _check_folder(folder)
        if not (folder / files.CONFIG).is_file():
            raise UnreadableNow(f"its folder has no {files.CONFIG}")
        told = files.read_object(folder, files.CONFIG)
        with _importing:
            from transformers import CONFIG_MAPPING, AutoConfig, __version__

        if (kind := told.get("model_type")) is None:
            raise Unmet(f"{files.CONFIG} has no model_type")
        known = ValueKind(f"one that this version knows, which has Transformers {__version__}", _is_in(CONFIG_MAPPING))
        if (why := fault("model_type", kind, known)) is not None:
            raise Unmet(f"{files.CONFIG}: {why}")
        AutoConfig.from_pretrained(path, local_files_only=True, trust_remote_code=False)
    except Unmet:
        raise
    except Exception as error:
        raise _fault(error)(f"its config.json cannot be used: {_line(folder, error)}") from error


def _is_in(known: Container[Any]) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, str) and value in known


def _check_folder(folder: Path) -> None:
    if not folder.is_dir():
        raise UnreadableNow("its folder is not there")


def _load(folder: Path, told: Mapping[str, Any]) -> Any:
    """A tokenizer of transformers. `told`: the folder's tokenizer_config.json."""
    if (folder / "tekken.json").is_file() and not (folder / "tokenizer.json").is_file():
        raise Unmet("its tokenizer is a tekken.json alone, which is not supported: add the checkpoint's tokenizer.json")
    with _importing:
        from transformers import AutoTokenizer

    options: dict[str, Any] = {"local_files_only": True, "clean_up_tokenization_spaces": False}
    if "fix_mistral_regex" not in told:
        # Without this option, transformers warns of a pattern that it takes for a wrong one in every folder without a
        # version of its own in config.json. SGLang leaves the pattern as it is.
        options["fix_mistral_regex"] = False
    tokenizer = AutoTokenizer.from_pretrained(str(folder), trust_remote_code=False, **options)
    if type(tokenizer).__name__ == repairs.GENERIC_CLASS:
        kind = repairs.declared_class(told)
        if kind is not None and kind.__name__ != repairs.GENERIC_CLASS:
            with contextlib.suppress(OSError, ValueError, TypeError, ImportError):  # what AutoTokenizer made is used
                tokenizer = kind.from_pretrained(str(folder), **options)  # type: ignore[attr-defined]
    repairs.mend(tokenizer, folder, told)
    return tokenizer


def _fault(error: BaseException) -> type[Unmet]:
    """UnreadableNow or Unmet, by the error that was raised first: libraries turn it into other kinds on the way up."""
    first = first_of_chain(error)
    passes = isinstance(first, MemoryError) or (isinstance(first, OSError) and first.errno not in (None, errno.ENOENT))
    return UnreadableNow if passes else Unmet


def _is_fault(error: BaseException) -> bool:
    """Whether it is an error of what was read, and no request to end the process."""
    return isinstance(error, Exception) or type(error).__name__ == "PanicException"


def _blamed(folder: Path, told: Mapping[str, Any], error: BaseException) -> str:
    """One line that names the file at fault, which the libraries do not, found by reading less and less of the folder.
    `told`: its tokenizer_config.json. Where the files are not there, transformers speaks of hubs and identifiers."""
    line = _line(folder, error)
    if (there := next((name for name in _FILES if (folder / name).is_file()), None)) is None:
        return "there is no tokenizer.json or tokenizer.model in its folder"
    if there != files.TOKENIZER:
        return f"{there}: {line}"
    try:
        files.read_object(folder, files.TOKENIZER)
        if (folder / files.CONFIG).is_file():
            check_config(str(folder))
    except Unmet as first:
        return str(first)
    from tokenizers import Tokenizer as RawTokenizer
    from transformers import PreTrainedTokenizerFast

    alone = _failure(lambda: RawTokenizer.from_file(str(folder / files.TOKENIZER)))
    if alone is not None:
        return f"{files.TOKENIZER}: {_line(folder, alone)}"
    if "trust_remote_code" in str(error):
        return f"{files.SETTINGS} names code of the folder's own (auto_map), which is not run"
    if _failure(lambda: PreTrainedTokenizerFast.from_pretrained(str(folder), local_files_only=True)) is not None:
        return f"{files.SETTINGS if told else 'special_tokens_map.json'}: {line}"
    if (kind := told.get("tokenizer_class")) is not None:
        return f"{files.SETTINGS}: tokenizer_class = {kind!r} does not take its tokenizer.json ({line}); {_FAST}"
    return f"{files.CONFIG}: the tokenizer of its model_type does not take its tokenizer.json ({line}); {_FAST}"


_FAST = "PreTrainedTokenizerFast as tokenizer_class takes it as it is"


def _failure(attempt: Callable[[], object]) -> BaseException | None:
    try:
        attempt()
    except BaseException as error:
        if not _is_fault(error):
            raise
        return error
    return None


def _line(folder: Path, error: BaseException) -> str:
    """What a library said, in one line that does not name the place of the folder."""
    text = " ".join(str(error).split())[:_LONGEST_WHY] or type(error).__name__
    return text.replace(str(folder) + os.sep, "").replace(str(folder), "its folder")
