"""Repairs that SGLang's own server makes to a tokenizer after transformers has loaded it, done in the same way: the
gateway's token ids are then those that the model would have been given there.

Source: SGLang 0.5.23, sglang/srt/utils/hf_transformers/tokenizer.py. `tests/tokenization/test_beside_sglang.py`
compares the two.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

GENERIC_CLASS = "TokenizersBackend"
"""Class that transformers 5 takes where it knows no tokenizer class of a model's own."""
_KEEPS_FLAGS = frozenset(
    {
        "LlamaTokenizer",
        "LlamaTokenizerFast",
        "CodeLlamaTokenizer",
        "CodeLlamaTokenizerFast",
        "GemmaTokenizer",
        "GemmaTokenizerFast",
        "CohereTokenizerFast",
    }
)
"""Classes whose flags `add_bos_token` and `add_eos_token` transformers 4 followed."""
_BASE_CLASSES = ("PreTrainedTokenizer", "PreTrainedTokenizerBase")


def declared_class(settings: Mapping[str, Any]) -> type | None:
    """The class that tokenizer_config.json (`settings`) names, where transformers has one of that name that can load a
    folder; else None."""
    import transformers

    name = settings.get("tokenizer_class")
    if not isinstance(name, str) or name in _BASE_CLASSES:
        return None
    found = getattr(transformers, name, None)
    return found if isinstance(found, type) else None


def mend(tokenizer: Any, folder: Path, settings: Mapping[str, Any]) -> None:
    """Mends `tokenizer`, which transformers made of `folder`. `settings`: its tokenizer_config.json. Raises what the
    tokenizers library raises at a tokenizer.json that it cannot read."""
    _restore_components(tokenizer, folder / "tokenizer.json")
    _restore_flags(tokenizer, settings)


def _restore_components(tokenizer: Any, path: Path) -> None:
    """Takes pre-tokenizer and decoder from tokenizer.json where the loaded ones are of another kind. Some classes of
    transformers 5 build them anew, as SentencePiece has them, also where the file has byte-level ones."""
    from tokenizers import Tokenizer

    backend = getattr(tokenizer, "_tokenizer", None)
    if backend is None or not path.is_file():
        return
    told = Tokenizer.from_file(str(path))
    loaded, said = backend.pre_tokenizer, told.pre_tokenizer
    if loaded is not None and said is not None and type(loaded) is not type(said):
        backend.pre_tokenizer, backend.decoder = said, told.decoder


def _restore_flags(tokenizer: Any, settings: Mapping[str, Any]) -> None:
    """Sets `add_bos_token` and `add_eos_token` again, which transformers 5 forgets where there is a tokenizer.json,
    whose post-processor may rely on them."""
    from transformers import PreTrainedTokenizerFast

    if settings.get("tokenizer_class", "") not in _KEEPS_FLAGS:
        return
    bos, eos = settings.get("add_bos_token"), settings.get("add_eos_token")
    flags = {"add_bos_token": True if bos is None else bos, "add_eos_token": bool(eos)}
    if isinstance(tokenizer, PreTrainedTokenizerFast):
        flags["add_eos_token"] = False  # transformers 4 left the end of a text to the file
    changed = {name: value for name, value in flags.items() if getattr(tokenizer, name, None) != value}
    for name, value in changed.items():
        setattr(tokenizer, f"_{name}", value)
    if changed and hasattr(tokenizer, "update_post_processor"):
        tokenizer.update_post_processor()
