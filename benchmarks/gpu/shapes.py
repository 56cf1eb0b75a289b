"""Model folders in the shapes of well-known models: a configuration alone, or with random weights."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from testing import checkpoint_headers

_COMMON: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "torch_dtype": "bfloat16",
    "vocab_size": 128256,
    "num_key_value_heads": 8,
    "hidden_act": "silu",
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "tie_word_embeddings": False,
    "bos_token_id": 0,
    "eos_token_id": 1,
}
_SHAPES: dict[str, dict[str, Any]] = {
    "tiny": {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 3, "num_attention_heads": 4}
    | {"num_key_value_heads": 2, "head_dim": 32, "vocab_size": 4096},
    "1b": {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "num_attention_heads": 32}
    | {"head_dim": 64, "tie_word_embeddings": True},
    "3b": {"hidden_size": 3072, "intermediate_size": 8192, "num_hidden_layers": 28, "num_attention_heads": 24}
    | {"head_dim": 128, "tie_word_embeddings": True},
    "8b": {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32}
    | {"head_dim": 128},
    # Mistral's of 7B and Nemo of 12B: Llamas but for their names.
    "7b": {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32}
    | {"head_dim": 128, "vocab_size": 32000},
    "12b": {"hidden_size": 5120, "intermediate_size": 14336, "num_hidden_layers": 40, "num_attention_heads": 32}
    | {"head_dim": 128, "vocab_size": 131072},
    # SmolLM2-135M's, which is a Llama too.
    "135m": {"hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30, "num_attention_heads": 9}
    | {"num_key_value_heads": 3, "head_dim": 64, "vocab_size": 49152, "rope_theta": 100000.0}
    | {"tie_word_embeddings": True},
}
NAMES = tuple(_SHAPES)
STATES_OF_A_REQUEST = 5
"""States that SGLang wants on a GPU for each request that may run: its own, two in which it keeps what it will cache
within prompts and answers, and two that are cached. On a CPU it would do with three, of the same bytes."""


def write(folder: Path, name: str, **changes: Any) -> Path:
    """Llama 3's of that size (`tiny`: of none, to try programs without a GPU); returns the folder. With random weights
    a model whose embeddings are tied repeats its last token for ever: where answers count, untie them by `changes`."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(_COMMON | _SHAPES[name] | changes, indent=1))
    return folder


def write_checkpoint(folder: Path, name: str, device: str = "cuda", file_bytes: int = 0) -> Path:
    """The same with bf16 safetensors, a file for each layer or as many as `file_bytes` say, and a tokenizer. Drawn on
    the device, seeded by name; 16 GB take about 15 s to a fast disk."""
    import torch
    from safetensors.torch import save_file

    write(folder, name)
    write_tokenizer(folder)
    index: dict[str, str] = {}
    files = _tensors(json.loads((folder / "config.json").read_text()))
    if file_bytes:
        files = _together(files, file_bytes)
    for number, tensors in enumerate(files):
        file = f"model-{number:05d}.safetensors"
        drawn = {}
        for tensor, shape in tensors.items():
            index[tensor] = file
            generator = torch.Generator(device).manual_seed(len(index))
            if len(shape) < 2:
                drawn[tensor] = torch.ones(shape, dtype=torch.bfloat16)
            else:
                scale = 1.0 if "embed" in tensor else shape[-1] ** -0.5 * (1.7 if "q_proj" in tensor else 1.0)
                values = torch.randn(shape, dtype=torch.bfloat16, device=device, generator=generator)
                drawn[tensor] = (values * scale).cpu()
        save_file(drawn, folder / file, metadata={"format": "pt"})
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))
    if device.startswith("cuda"):
        torch.cuda.empty_cache()
    return folder


def _together(files: list[dict[str, tuple[int, ...]]], file_bytes: int) -> list[dict[str, tuple[int, ...]]]:
    """As many as fit, in the order of the model: the embeddings first and the head last."""
    ends, *layers = files
    first = next(iter(ends))
    ordered = [{first: ends.pop(first)}, *layers, *({name: shape} for name, shape in ends.items())]
    together: list[dict[str, tuple[int, ...]]] = []
    room = 0
    for tensors in ordered:
        nbytes = sum(2 * math.prod(shape) for shape in tensors.values())
        if nbytes > room:
            together.append({})
            room = file_bytes
        together[-1] |= tensors
        room -= nbytes
    return together


def write_headers(folder: Path, name: str) -> Path:
    """The same without the weights: files that say what would be in them, and are holes on the disk, for engines that
    draw their own (`random_weights`). With a tokenizer."""
    write(folder, name)
    write_tokenizer(folder)
    config = json.loads((folder / "config.json").read_text())
    named = {tensor: shape for file in _tensors(config) for tensor, shape in file.items()}
    checkpoint_headers.write(folder / "model.safetensors", named)
    return folder


def write_adapter(folder: Path, name: str, rank: int, seed: int) -> Path:
    """An adapter (LoRA) of all linear layers of a model of that shape, in PEFT's format, with random bf16 values that
    change its answers; returns the folder."""
    import torch
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    drawn = torch.Generator().manual_seed(seed)
    tensors: dict[str, torch.Tensor] = {}
    modules: set[str] = set()
    for tensor, shape in (item for file in _tensors(_COMMON | _SHAPES[name]) for item in file.items()):
        layer = tensor.removesuffix(".weight")
        if layer.endswith("_proj"):
            modules.add(layer.rpartition(".")[2])
            for part, size in (("A", (rank, shape[1])), ("B", (shape[0], rank))):
                scale = size[1] ** -0.5
                values = scale * torch.randn(size, generator=drawn)
                tensors[f"base_model.model.{layer}.lora_{part}.weight"] = values.to(torch.bfloat16)
    save_file(tensors, folder / "adapter_model.safetensors")
    told = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": rank, "lora_alpha": rank // 2, "bias": "none"}
    told |= {"target_modules": sorted(modules), "base_model_name_or_path": name}
    (folder / "adapter_config.json").write_text(json.dumps(told))
    return folder


def write_tokenizer(folder: Path) -> None:
    """One in which every token of the vocabulary is text, so that every token shows in a stream. Apart from single
    bytes, tokens are words of four letters with a space before them: a text of such words is as many tokens as
    words, whoever makes one of the other."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    config = json.loads((folder / "config.json").read_text())
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = [*alphabet, *("\u0120" + _letters(number) for number in range(len(alphabet), config["vocab_size"]))]
    # A word of the vocabulary is one token, as Llama 3's tokenizer has it: there are no merges to make it of letters.
    tokenizer = Tokenizer(models.BPE({word: number for number, word in enumerate(words)}, [], ignore_merges=True))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}))


def _letters(number: int) -> str:
    """Four of them, other ones for each number below 26 ** 4."""
    return "".join(chr(ord("a") + number // 26**place % 26) for place in (3, 2, 1, 0))


def _tensors(config: dict[str, Any]) -> list[dict[str, tuple[int, ...]]]:
    """Names and shapes, a dictionary for each file."""
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    queries = config["num_attention_heads"] * config["head_dim"]
    keys = config["num_key_value_heads"] * config["head_dim"]
    ends: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (config["vocab_size"], hidden),
        "model.norm.weight": (hidden,),
    }
    if not config["tie_word_embeddings"]:
        ends["lm_head.weight"] = (config["vocab_size"], hidden)
    files = [ends]
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}."
        files.append(
            {
                prefix + "self_attn.q_proj.weight": (queries, hidden),
                prefix + "self_attn.k_proj.weight": (keys, hidden),
                prefix + "self_attn.v_proj.weight": (keys, hidden),
                prefix + "self_attn.o_proj.weight": (hidden, queries),
                prefix + "mlp.gate_proj.weight": (inner, hidden),
                prefix + "mlp.up_proj.weight": (inner, hidden),
                prefix + "mlp.down_proj.weight": (hidden, inner),
                prefix + "input_layernorm.weight": (hidden,),
                prefix + "post_attention_layernorm.weight": (hidden,),
            }
        )
    return files


def weights_bytes(config: dict[str, Any]) -> int:
    """Of a dense model in 16 bits, a little too many."""
    hidden, layers = config["hidden_size"], config["num_hidden_layers"]
    head_dim = config.get("head_dim") or hidden // config["num_attention_heads"]
    rows = (config["num_attention_heads"] + config["num_key_value_heads"]) * 2 * head_dim
    layer = hidden * (rows + 3 * config["intermediate_size"] + 16)
    embeddings = config["vocab_size"] * hidden * (1 if config["tie_word_embeddings"] else 2)
    return int(2 * (layers * layer + embeddings) * 1.02) + (64 << 20)


def kv_bytes_per_token(config: dict[str, Any], itemsize: int = 2) -> int:
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    return int(2 * config["num_hidden_layers"] * config["num_key_value_heads"] * head_dim * itemsize)
