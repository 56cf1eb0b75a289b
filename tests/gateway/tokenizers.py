"""Tiny tokenizers, made here, one of each kind that text depends on."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path

from tokenizers import Tokenizer as RustTokenizer
from tokenizers import decoders, models, pre_tokenizers, processors, trainers

CORPUS = [
    "hello world, the quick brown fox jumps over the lazy dog",
    "héllo wörld, 你好，世界 😀👍🏽 naïve façade",
    "user assistant system stop start one two three four five",
] * 4
SPECIAL = ["<s>", "</s>", "<|user|>", "<|assistant|>"]
TEMPLATE = (
    "{{ '<s>' }}{% for message in messages %}"
    "{% if message['role'] == 'forbidden' %}{{ raise_exception('no such role') }}{% endif %}"
    "{{ '<|' + message['role'] + '|>' + message['content'] + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


def byte_level() -> RustTokenizer:
    """Like Llama 3, Qwen and GPT."""
    tokenizer = RustTokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.add_tokens(["[added]", "ünüsual"])
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A $B", special_tokens=[("<s>", tokenizer.token_to_id("<s>"))]
    )
    return tokenizer


def sentence_piece() -> RustTokenizer:
    """Like Llama 2 and Gemma: spaces as U+2581, bytes where the vocabulary has nothing, one space dropped in front."""
    tokenizer = RustTokenizer(models.BPE(byte_fallback=True, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    trainer = trainers.BpeTrainer(
        vocab_size=500,
        special_tokens=["<unk>", *SPECIAL, *(f"<0x{number:02X}>" for number in range(256))],
        show_progress=False,
    )
    tokenizer.train_from_iterator(["hello world the quick brown fox ▁▁ naïve 你好"] * 4, trainer)
    # Byte tokens are in the vocabulary as ordinary ones, not special.
    described = json.loads(tokenizer.to_str())
    described["added_tokens"] = [t for t in described["added_tokens"] if not t["content"].startswith("<0x")]
    return RustTokenizer.from_str(json.dumps(described))


def write(tokenizer: RustTokenizer, folder: Path, template: str | None = TEMPLATE) -> str:
    """A Hugging Face folder with nothing but a tokenizer."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>"}
    if template is not None:
        settings["chat_template"] = template
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return str(folder)


@cache
def tiny() -> RustTokenizer:
    return byte_level()
