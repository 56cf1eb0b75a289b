"""What SGLang's own server mends of a tokenizer after transformers has loaded it, done in the same way: the gateway's
token ids are then those that the model would have been given there.

Source: SGLang 0.5.16, sglang/srt/utils/hf_transformers/tokenizer.py. `tests/tokenization/test_beside_sglang.py`
compares the two.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

GENERIC_CLASS = "TokenizersBackend"
"""What transformers 5 takes where it knows no tokenizer class of a model's own."""
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
"""Classes by whose flags `add_bos_token` and `add_eos_token` transformers 4 went."""
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
    """Mends `tokenizer`, which transformers made of `folder`. `settings`: its tokenizer_config.json. A tokenizer.json
    that cannot be read raises what the tokenizers library raises."""
    _restore_components(tokenizer, folder / "tokenizer.json")
    _restore_flags(tokenizer, settings)


def _restore_components(tokenizer: Any, path: Path) -> None:
    """Some classes of transformers 5 build pre-tokenizer and decoder anew, as SentencePiece has them, also where
    tokenizer.json has byte-level ones. Those of another kind are taken from the file."""
    from tokenizers import Tokenizer

    backend = getattr(tokenizer, "_tokenizer", None)
    if backend is None or not path.is_file():
        return
    told = Tokenizer.from_file(str(path))
    loaded, said = backend.pre_tokenizer, told.pre_tokenizer
    if loaded is not None and said is not None and type(loaded) is not type(said):
        backend.pre_tokenizer, backend.decoder = said, told.decoder


def _restore_flags(tokenizer: Any, settings: Mapping[str, Any]) -> None:
    """Transformers 5 forgets `add_bos_token` and `add_eos_token` where there is a tokenizer.json, whose post-processor
    may rely on them."""
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
