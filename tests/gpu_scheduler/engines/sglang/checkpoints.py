"""Small random checkpoints in Hugging Face's format, and what Transformers says they generate."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM, Qwen3Config, Qwen3Model

from protos import engine_pb2

VOCABULARY = 1024
CONTEXT = 512


def llama(folder: Path, seed: int = 0) -> Path:
    """Two key-value heads of 32 in three layers: 1,536 bytes a token."""
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=False,
        initializer_range=0.08,
        bos_token_id=0,
        eos_token_id=1,
    )
    return _save(LlamaForCausalLM, config, folder, seed)


def qwen(folder: Path, seed: int = 1) -> Path:
    """Another shape, tied embeddings, biases; 1,920 bytes a token, which no extent is a multiple of."""
    config = Qwen2Config(
        vocab_size=VOCABULARY,
        hidden_size=144,
        intermediate_size=200,
        num_hidden_layers=5,
        num_attention_heads=6,
        num_key_value_heads=2,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=True,
        initializer_range=0.08,
        bos_token_id=0,
        eos_token_id=1,
    )
    return _save(Qwen2ForCausalLM, config, folder, seed)


def embedder(folder: Path, seed: int = 2) -> Path:
    """As Qwen's embedding models are published: the names of its tensors lack "model." in front."""
    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=96,
        intermediate_size=160,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=True,
        initializer_range=0.08,
        bos_token_id=0,
        eos_token_id=1,
    )
    torch.manual_seed(seed)
    Qwen3Model(config).save_pretrained(folder)
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "architectures": ["Qwen3ForCausalLM"]}))
    return folder


def _save(kind: type, config: object, folder: Path, seed: int) -> Path:
    torch.manual_seed(seed)
    model = kind(config).eval()
    model.generation_config.pad_token_id = 1
    model.save_pretrained(folder)
    return folder


def prompts(count: int, seed: int = 5) -> list[list[int]]:
    """Of 5 to 120 tokens; every third one begins like the one before it."""
    generator = torch.Generator().manual_seed(seed)
    made: list[list[int]] = []
    for number in range(count):
        length = 5 + int(torch.randint(0, 115, (1,), generator=generator))
        tokens = torch.randint(2, VOCABULARY, (length,), generator=generator).tolist()
        made.append(made[-1][: len(made[-1]) // 2] + tokens[:20] if number % 3 == 2 else tokens)
    return made


@contextmanager
def one_thread() -> Iterator[None]:
    """Beside engines on the same cores, several threads are many times slower than one."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def reference(path: Path, prompts: Sequence[Sequence[int]], new_tokens: int) -> list[list[int]]:
    """Greedy tokens, end-of-sequence ignored."""
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    sees = "vision_config" in json.loads((path / "config.json").read_text())
    kind = AutoModelForImageTextToText if sees else AutoModelForCausalLM
    model = kind.from_pretrained(path, dtype=torch.float32).eval()
    model.generation_config.eos_token_id = None
    said = []
    with one_thread(), torch.inference_mode():
        for prompt in prompts:
            ids = torch.tensor([list(prompt)])
            out = model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                do_sample=False,
                max_new_tokens=new_tokens,
            )
            said.append(out[0, ids.shape[1] :].tolist())
    return said


def logprobs(path: Path, texts: Sequence[Sequence[int]]) -> list[torch.Tensor]:
    """Of each text a row for every token but the first: how likely all tokens were in its place."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    with one_thread(), torch.inference_mode():
        return [torch.log_softmax(model(torch.tensor([list(text)])).logits[0, :-1], dim=-1) for text in texts]


def embeddings(path: Path, prompts: Sequence[Sequence[int]]) -> list[list[float]]:
    """The last hidden state of each prompt's last token, of length 1."""
    from transformers import AutoModel

    model = AutoModel.from_pretrained(path, dtype=torch.float32).eval()
    with one_thread(), torch.inference_mode():
        states = [model(torch.tensor([list(prompt)])).last_hidden_state[0, -1] for prompt in prompts]
    return [torch.nn.functional.normalize(state, dim=0).tolist() for state in states]


def laid_out(manifest: bytes) -> int:
    """Bytes of the weights range up to the end of the last tensor in a manifest."""
    ends = []
    for tensor in engine_pb2.Manifest.FromString(manifest).tensors:
        reach = 1 + sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride, strict=True))
        ends.append(tensor.offset_bytes + reach * getattr(torch, tensor.dtype).itemsize)
    return max(ends)
