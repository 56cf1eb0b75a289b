"""Folders as people publish them: tokenizers of several kinds under settings that fit them, and that do not."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tokenizers import Regex, decoders, pre_tokenizers, processors
from tokenizers import Tokenizer as RustTokenizer

from tests.gateway import tokenizers

EXAMPLES = Path(__file__).resolve().parents[2] / "examples" / "models"
CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
INSTRUCT = (
    "{{ bos_token }}{% for message in messages %}{% if message.role == 'user' %}{{ '[INST] ' + message.content "
    "+ ' [/INST]' }}{% elif message.role == 'assistant' %}{{ ' ' + message.content + eos_token }}{% else %}"
    "{{ raise_exception('only user and assistant roles are supported') }}{% endif %}{% endfor %}"
)
IN_PARTS = (
    "{% for message in messages %}<|{{ message.role }}|>{% if message.content is string %}{{ message.content }}"
    "{% else %}{% for part in message['content'] %}[{{ part.text }}]{% endfor %}{% endif %}"
    "{% for call in message.tool_calls or [] %}<call>{{ call.function.arguments | tojson }}</call>{% endfor %}"
    "{% if message.name is defined %} of {{ message.name }}{% endif %}{% endfor %}<|assistant|>"
)
TEMPLATES = {"instruct": INSTRUCT, "chatml": CHATML, "parts": IN_PARTS}


def with_split() -> RustTokenizer:
    """As Llama 3 has it: a pattern, then bytes."""
    made = tokenizers.byte_level()
    made.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(r"\p{N}{1,3}|[^\s\p{L}\p{N}]+|\s*\p{L}+|\s+"), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    return made


def with_message_end() -> RustTokenizer:
    """As Llama 3.1 has it: a token that ends a message, beside the one that ends a turn."""
    made = tokenizers.byte_level()
    made.add_special_tokens(["<|eom_id|>"])
    return made


def without_bos() -> RustTokenizer:
    """As DeepSeek V3 has it: the BOS is left to the settings."""
    made = tokenizers.byte_level()
    made.post_processor = processors.ByteLevel(trim_offsets=False)
    return made


def with_prefix_space() -> RustTokenizer:
    made = tokenizers.byte_level()
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    made.decoder = decoders.ByteLevel()
    return made


def write(
    folder: Path,
    kind: Callable[[], RustTokenizer] | Path,
    settings: dict[str, Any],
    *,
    template: str | None = INSTRUCT,
    config: dict[str, Any] | None = None,
) -> Path:
    """A folder without weights. `kind`: makes its tokenizer.json, or is the path of its tokenizer.model."""
    folder.mkdir(parents=True)
    if isinstance(kind, Path):
        shutil.copy(kind, folder / "tokenizer.model")
    else:
        kind().save(str(folder / "tokenizer.json"))
    said = {"bos_token": "<s>", "eos_token": "</s>", **settings}
    if template is not None:
        said["chat_template"] = template
    (folder / "tokenizer_config.json").write_text(json.dumps(said))
    shape = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 600, **(config or {})}
    (folder / "config.json").write_text(json.dumps(shape))
    return folder


def sentence_piece_model(folder: Path) -> Path:
    """A tokenizer.model, of SentencePiece's own trainer. The trainer runs in a process of its own: beside other
    libraries that bring a protobuf of theirs, it sometimes aborts the process."""
    folder.mkdir(parents=True, exist_ok=True)
    corpus = folder / "corpus.txt"
    corpus.write_text("\n".join(tokenizers.CORPUS * 8))
    options = {
        "input": str(corpus),
        "model_prefix": str(folder / "made"),
        "vocab_size": 360,
        "model_type": "bpe",
        "byte_fallback": True,
        "hard_vocab_limit": False,
        "normalization_rule_name": "identity",
        "remove_extra_whitespaces": False,
        "minloglevel": 2,
    }
    train = f"import sentencepiece; sentencepiece.SentencePieceTrainer.train(**{options!r})"
    subprocess.run([sys.executable, "-c", train], check=True, capture_output=True)
    return folder / "made.model"


def published(root: Path) -> dict[str, Path]:
    """All of them, by a name that says what is special."""
    byte, piece = tokenizers.byte_level, tokenizers.sentence_piece
    model = sentence_piece_model(root / "made")
    mistral = {"model_type": "mistral", "architectures": ["MistralForCausalLM"]}
    kinds: dict[str, tuple[Callable[[], RustTokenizer] | Path, dict[str, Any], dict[str, Any] | None]] = {
        "byte level": (byte, {"tokenizer_class": "PreTrainedTokenizerFast"}, None),
        "byte level as LlamaTokenizerFast": (byte, {"tokenizer_class": "LlamaTokenizerFast"}, None),
        "byte level as LlamaTokenizer": (byte, {"tokenizer_class": "LlamaTokenizer", "legacy": True}, None),
        "byte level, no class": (byte, {}, None),
        "byte level, qwen2, no class": (byte, {}, {"model_type": "qwen2"}),
        "byte level as Qwen2Tokenizer": (byte, {"tokenizer_class": "Qwen2Tokenizer"}, {"model_type": "qwen2"}),
        "another pattern as Qwen2Tokenizer": (with_split, {"tokenizer_class": "Qwen2Tokenizer"}, None),
        "byte level as GPT2Tokenizer": (byte, {"tokenizer_class": "GPT2Tokenizer"}, None),
        "split and bytes": (with_split, {"tokenizer_class": "PreTrainedTokenizerFast"}, None),
        "split and bytes as LlamaTokenizerFast": (with_split, {"tokenizer_class": "LlamaTokenizerFast"}, None),
        "a message's end": (with_message_end, {"tokenizer_class": "PreTrainedTokenizerFast"}, None),
        "BOS by the class": (without_bos, {"tokenizer_class": "LlamaTokenizerFast"}, None),
        "BOS by a flag": (without_bos, {"tokenizer_class": "LlamaTokenizerFast", "add_bos_token": True}, None),
        "no BOS by a flag": (byte, {"tokenizer_class": "LlamaTokenizerFast", "add_bos_token": False}, None),
        "EOS by a flag": (byte, {"tokenizer_class": "LlamaTokenizerFast", "add_eos_token": True}, None),
        "flags of no class": (byte, {"tokenizer_class": "Qwen2Tokenizer", "add_bos_token": True}, None),
        "prefix space": (with_prefix_space, {"tokenizer_class": "PreTrainedTokenizerFast"}, None),
        "mistral, no version": (with_split, {"tokenizer_class": "PreTrainedTokenizerFast"}, mistral),
        "mistral, old version": (
            with_split,
            {"tokenizer_class": "LlamaTokenizerFast"},
            {**mistral, "transformers_version": "4.40.0"},
        ),
        "mistral, pattern mended": (
            with_split,
            {"tokenizer_class": "PreTrainedTokenizerFast", "fix_mistral_regex": True},
            mistral,
        ),
        "pieces": (piece, {"tokenizer_class": "PreTrainedTokenizerFast"}, None),
        "pieces as LlamaTokenizerFast": (piece, {"tokenizer_class": "LlamaTokenizerFast"}, None),
        "pieces, legacy": (piece, {"tokenizer_class": "LlamaTokenizer", "legacy": True}, None),
        "tokenizer.model": (model, {"tokenizer_class": "LlamaTokenizer", "legacy": False}, None),
        "tokenizer.model, legacy": (model, {"tokenizer_class": "LlamaTokenizer", "legacy": True}, None),
        "tokenizer.model, EOS": (model, {"tokenizer_class": "LlamaTokenizer", "add_eos_token": True}, None),
        "tokenizer.model, no class": (model, {}, None),
    }
    named = {
        name: write(root / str(number), kind, settings, config=config)
        for number, (name, (kind, settings, config)) in enumerate(kinds.items())
    }
    for name, template in TEMPLATES.items():
        named[f"template: {name}"] = write(
            root / name, byte, {"tokenizer_class": "PreTrainedTokenizerFast"}, template=template
        )
    return named | {path.name: path for path in sorted(EXAMPLES.iterdir()) if path.is_dir()}
