"""The tokens that a demonstration model is trained on: its vocabulary, rows of dialogue and a stream of text."""

from __future__ import annotations

import json
import random
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import tokenizers
import torch
import transformers
from dialogue import SYSTEM_PROMPTS, Asked, ChatFormat
from transformers.models.qwen2.tokenization_qwen2 import PRETOKENIZE_REGEX

CHAT_ROW = 512  # tokens of a row of dialogue; a row of text is as long as the context
IGNORED = -100  # the label of a token that is not to be learned: what the user says


def make_tokenizer(chat: ChatFormat, vocab_size: int, context: int, texts: Iterable[str], out: Path) -> Any:
    """Trains a byte-level BPE vocabulary and writes the tokenizer's files; returns it as transformers loads it.

    The alphabet holds all 256 bytes, so that every text can be said and nothing is unknown.
    """
    bpe = tokenizers.Tokenizer(tokenizers.models.BPE())
    bpe.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    if chat.tokenizer_class == "Qwen2Tokenizer":  # that class sets these two itself, whatever the file says
        bpe.normalizer = tokenizers.normalizers.NFC()
        words = tokenizers.pre_tokenizers.Split(tokenizers.Regex(PRETOKENIZE_REGEX), "isolated")
        letters = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        bpe.pre_tokenizer = tokenizers.pre_tokenizers.Sequence([words, letters])
    bpe.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(chat.special_tokens),
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator(texts, trainer)
    if chat.bos is not None:
        bpe.post_processor = tokenizers.processors.TemplateProcessing(
            single=f"{chat.bos} $A",
            pair=f"{chat.bos} $A {chat.bos} $B",
            special_tokens=[(chat.bos, bpe.token_to_id(chat.bos))],
        )
    out.mkdir(parents=True, exist_ok=True)
    bpe.save(str(out / "tokenizer.json"))
    config = {
        "tokenizer_class": chat.tokenizer_class,
        "model_max_length": context,
        "bos_token": chat.bos,
        "eos_token": chat.end,
        "pad_token": chat.pad,
        "clean_up_tokenization_spaces": False,
        "chat_template": chat.template,
    }
    (out / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")
    return transformers.AutoTokenizer.from_pretrained(out)


def hold_out(documents: list[str], seed: int) -> tuple[list[str], list[str]]:
    """The documents in another order, and the last of them, a fiftieth of the text, apart."""
    documents = list(documents)
    random.Random(seed).shuffle(documents)
    size, kept = sum(map(len, documents)), 0
    while sum(map(len, documents[:kept])) < size * 0.98:
        kept += 1
    return documents[:kept], documents[kept:]


class Rows:
    """Rows of dialogue (`chat_ids`, `chat_labels`), and a stream of `text` with the paragraphs' `starts`."""

    def __init__(
        self,
        chat: ChatFormat,
        tokenizer: Any,
        context: int,
        dialogues: dict[float, list[Asked]],
        documents: list[str],
        rows: int,
        seed: int,
    ) -> None:
        """`dialogues` has, for each share of all questions (of sum 1), what those are drawn from."""
        self._chat, self._tokenizer, self._context = chat, tokenizer, context
        self._random = random.Random(seed)
        self._opening = [] if chat.bos is None else [tokenizer.bos_token_id]
        self._systems = [self._ids(chat.prompt("system", text)) for text in SYSTEM_PROMPTS]
        self._gap = self._ids(chat.gap)

        self.text, self.starts = self.stream(documents)
        self._check_template(*next(iter(dialogues.values()))[0])
        self._shares, self._kinds = (
            list(dialogues),
            [[self._turns(*asked) for asked in kind] for kind in dialogues.values()],
        )
        pairs = [self._dialogue() for _ in range(rows)]
        self.chat_ids = torch.tensor([ids for ids, _ in pairs])
        self.chat_labels = torch.tensor([labels for _, labels in pairs])

    def texts(self, stream: torch.Tensor, starts: torch.Tensor) -> torch.Tensor:
        """Rows of the stream as long as the context, one from each start."""
        rows = stream[starts[:, None] + torch.arange(self._context, device=stream.device)]
        if self._opening:
            rows = torch.cat([torch.full_like(rows[:, :1], self._opening[0]), rows[:, :-1]], dim=1)
        return rows

    def stream(self, documents: list[str]) -> tuple[torch.Tensor, torch.Tensor]:
        """Documents one after the other, and the paragraphs that are followed by a context of tokens."""
        stream: list[int] = []
        starts: list[int] = []
        for document in documents:
            for paragraph in document.split("\n\n"):
                starts.append(len(stream))
                stream += self._ids(paragraph + "\n\n")
            stream.append(self._tokenizer.eos_token_id)
        starts = [start for start in starts if start + self._context <= len(stream)]
        return torch.tensor(stream), torch.tensor(starts, dtype=torch.long)

    def _ids(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False)

    def _turns(self, asked: list[str], answer: str) -> tuple[list[list[int]], list[int]]:
        questions = [self._ids(self._chat.prompt("user", question)) for question in asked]
        return questions, self._ids(answer + self._chat.end)

    def _check_template(self, asked: list[str], answer: str) -> None:
        """Raises ValueError if transformers makes other tokens with the template than a row of dialogue has."""
        said = [("system", SYSTEM_PROMPTS[0]), ("user", asked[0]), ("assistant", answer)]
        messages = [{"role": role, "content": content} for role, content in said]
        templated = self._tokenizer.apply_chat_template(messages, tokenize=False)
        (question, *_), reply = self._turns(asked, answer)
        if self._ids(templated) != self._opening + self._systems[0] + question + reply + self._gap:
            raise ValueError(f"the chat template and the training rows disagree: {templated!r}")

    def _dialogue(self) -> tuple[list[int], list[int]]:
        """A conversation that fills a row; one in six has a system message."""
        ids = list(self._opening)
        if self._random.random() < 1 / 6:
            ids += self._random.choice(self._systems)
        labels = [IGNORED] * len(ids)
        while len(ids) < CHAT_ROW:
            (kind,) = self._random.choices(self._kinds, weights=self._shares)
            asked, answer = self._random.choice(kind)
            question = self._random.choice(asked)
            ids += question + answer + self._gap
            labels += [IGNORED] * len(question) + answer + [IGNORED] * len(self._gap)
        return ids[:CHAT_ROW], labels[:CHAT_ROW]
