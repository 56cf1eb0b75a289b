"""A reader of Hugging Face folders, which finds the memory that a folder's model needs, or why the folder cannot be
served.

Headers and small files are read, no weights; nothing is kept open.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any

from kv_kinds.layout import KvLayout, of_tokens
from loader.checkpoints import embedding, generation_defaults, reranking
from loader.checkpoints.adapter_folder import is_adapter
from loader.checkpoints.architectures import encoders, families, latent, quantisation, rope_tables
from loader.checkpoints.architectures.classes import CLASSES, MAMBA, Experts
from loader.checkpoints.architectures.kv_of_config import kv_layout
from loader.checkpoints.architectures.quantisation import Quantisation, QuantisedTensor
from loader.checkpoints.config_values import CONFIG
from loader.checkpoints.embedding import Embedding
from loader.checkpoints.errors import BrokenCheckpoint, PassingFault
from loader.checkpoints.generation_defaults import SamplingDefaults
from loader.checkpoints.reranking import Reranker
from loader.checkpoints.weight_files import (
    FLOATS,
    Tensor,
    check_fetched,
    other_weights,
    read_json,
    tensors_of,
)
from loader.policy.adapter_pool import MODULES, Linear
from services.wording.plurals import counted

ALIGN_BYTES = 256
"""Engines begin every tensor of a weights range at a multiple of this."""
_VOCABULARY_ROWS = 64
"""Engines pad embeddings to a multiple of this many rows."""
_TOKENIZERS = (("tokenizer.json",), ("tokenizer.model",), ("vocab.json", "merges.txt"))
_GPU_FLOAT_BYTES = 2
"""Bytes of a float on a GPU. Engines on CPUs have larger floats."""
_MXFP4_PADDING_DIVISOR = 8
"""Divisor of the bytes of experts in MXFP4: bytes that padding adds to them on GPUs. It adds 12.0 % to those of
gpt-oss-20b on an H200 (docs/lab/gpu-runs.md)."""
_FIRST_BYTES = 64
_VOCABULARY = ("model.embed_tokens.weight", families.EMBEDDINGS_OF_LAYERS, "lm_head.weight")
"""Tensors with a row for each token; they are never quantised."""
_PADDED = (*_VOCABULARY, "_embeddings.weight")
"""Ends of the names of tensors whose rows engines pad."""
_SCALES = ("_scale", "_scale_inv")
"""Ends of the names of tensors that engines hold in the type of the file."""
_FACTORS = ".per_expert_scale"
"""End of the names of tensors that end like scales too, but that engines hold in the model's floats."""
_BY_COLUMNS = (".o_proj", ".out_proj", ".down_proj", ".w2")
"""Ends of the names of linear layers whose columns are divided among devices. All others are divided by rows."""
_REPLICATED = frozenset(
    {
        *("gate", "router", *latent.REPLICATED),
        *(known.experts.shared_gate for known in CLASSES.values() if known.experts and known.experts.shared_gate),
    }
)
"""Names of linear layers of which each device has the whole: routers, gates of shared experts, projections to latent
vectors."""
_BY_HEAD = frozenset({"q_proj", "qkv_proj", "gate_proj", "up_proj", "gate_up_proj", "linear_attn"})
"""Names of modules whose vectors (biases, decays) are divided among devices as the rows of their layers are."""
_ONE_BYTE = frozenset({"F8_E4M3", "F8_E5M2", "I8"})
_WEIGHT_SCALES = ("weight_scale", "weight_scale_inv", "scale", "scales")
_SIDES = ("rows", "columns")
_NOT_QUANTISED = "config.json does not say how the weights are quantised"
_PACKED = (".qweight", ".weight_packed", "_blocks")
"""Ends of the names of tensors that quantised layers have in place of their weight."""
_OF_A_GENERATION = (".json", ".safetensors", ".model", ".txt", ".jinja")


@dataclass(frozen=True)
class Checkpoint:
    """A model by its config.json and the headers of its weights. Sizes are in bytes of one device's part."""

    generation: int
    """Number of the state of the folder's files (`fingerprint`), never 0. The number is another one once a file has
    changed."""
    architecture: str
    context_tokens: int
    layers: int
    kv_heads: int
    head_dim: int
    vocabulary: int
    weights_bytes: int
    """Bytes of the weights that an engine lays out, as near as headers tell, without the tables that it makes for a
    context (`held_bytes`). It measures the exact number when it loads."""
    kv: KvLayout
    """The kinds of KV of the model. Bytes of a state are those that the state fills, not rounded up to extents."""
    active_bytes: int = 0
    """Bytes of weights that one token goes through; fewer than all in a mixture of experts, or with embeddings in every
    layer."""
    expert_share: float = 1.0
    """Share of a layer's experts that one token goes through; 1 without experts, and of a class that is not in the
    table of classes."""
    verified: bool = True
    """False if answers of such a model were never compared with another implementation's: its class is not in the
    table of classes (`classes.py`), or it is an encoder whose weights have a GPU's floats."""
    quantisation: str = ""
    """How its weights are quantised, for people; empty: they are floats."""
    embedding: Embedding | None = None
    """What the model makes instead of text; None: it makes text."""
    reranker: Reranker | None = None
    """How it ranks documents; None: it is no reranker."""
    sampling: SamplingDefaults = SamplingDefaults()
    linears: tuple[Linear, ...] = ()
    """Linear layers of each decoder layer that may have an adapter; empty: none may, because of `no_adapters`."""
    no_adapters: str = ""
    """Why adapters of the model are not served."""
    position_bytes: int = 0
    """Bytes of a position's row in the tables of rotary embeddings, which engines keep beside the weights."""

    def held_bytes(self, context_tokens: int) -> int:
        """Bytes that an engine lays out for a context of so many tokens: weights and tables."""
        return self.weights_bytes + rope_tables.table_bytes(self.position_bytes, context_tokens)

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes of KV of a token, those of every kind that it adds to, windows included."""
        return self.kv.marginal(0)


def read(
    folder: str | os.PathLike[str],
    dtype_bytes: int,
    devices: int = 1,
    task: str = "",
    *,
    kv_dtype: str = "",
    unverified: bool = False,
) -> Checkpoint:
    """Reads and checks a folder. `dtype_bytes`: bytes of a float on the devices; `devices`: how many hold the model;
    `task`, `kv_dtype` and `unverified`: see `catalogue`. Blocks on the file system. Raises BrokenCheckpoint with one
    line that names what is wrong."""
    folder = Path(folder)
    with _faults_of(folder):
        _check_kind(folder)
        # The fingerprint comes first: files that change while they are read belong to the next generation.
        generation = fingerprint(folder, devices, task)
        found = _read(folder, dtype_bytes, devices, task, generation, unverified)
        return _with_small_kv(found, dtype_bytes) if kv_dtype == "fp8" else found


def read_config(
    folder: str | os.PathLike[str],
    dtype_bytes: int,
    devices: int = 1,
    *,
    kv_dtype: str = "",
    unverified: bool = False,
) -> Checkpoint:
    """Reads and checks the config.json of a folder whose weights are not there. Bytes of weights are those that tensors
    of such a model have, without a part for images, and with every layer quantised that config.json does not except; 0
    for a class that is not in the table of classes. Parameters and errors are those of `read`."""
    folder = Path(folder)
    with _faults_of(folder):
        _check_kind(folder)
        if (why := other_weights(os.listdir(folder))) is not None:
            raise BrokenCheckpoint(why)
        config = _config(folder)
        shape, quantised = _check_config(config, dtype_bytes, devices, unverified)
        if encoders.is_one(config):
            raise BrokenCheckpoint(f"{shape.architecture} is an encoder: its folder is read with its weights only")
        held: dict[str, Tensor] = {}
        beside: dict[str, tuple[int, ...]] = {}
        if shape.architecture in CLASSES:
            weights = families.expected_tensors(shape, config)
            expected = _expected(_floats(weights, quantised), weights, quantised)
            _check_divides(weights, expected, quantised, shape, config, devices)
            beside = families.held_beside(shape, config)
            held = {name: Tensor(min(each.dtypes), each.shapes[0], CONFIG) for name, each in expected.items()}
        found = _sized(fingerprint(folder, devices), config, shape, quantised, held, beside, dtype_bytes, devices)
        return _with_small_kv(found, dtype_bytes) if kv_dtype == "fp8" else found


@contextmanager
def _faults_of(folder: Path) -> Iterator[None]:
    """Context for reading a folder, in which what the operating system refuses is raised as a PassingFault."""
    try:
        yield
    except OSError as error:
        where = Path(os.fsdecode(error.filename)).name if error.filename else ""
        what = "its folder" if where in ("", folder.name) else where
        raise PassingFault(f"{what}: {error.strerror or error}") from None
    except MemoryError:
        raise PassingFault("host memory is short") from None


def check_config(folder: str | os.PathLike[str], dtype_bytes: int, *, unverified: bool = False) -> None:
    """Checks the config.json of a folder whose weights are not there yet, for a model on one device. Raises
    BrokenCheckpoint as `read` would."""
    _check_config(_config(Path(folder)), dtype_bytes, devices=1, unverified=unverified)


def fingerprint(folder: Path, devices: int = 1, task: str = "") -> int:
    """A number that tells one state of a checkpoint's files from another, by their names, sizes, times of change and
    inodes. The number also differs by the number of devices, and by the kind of answer (text, embeddings, ranks of
    documents)."""
    digest = hashlib.blake2b(f"{devices}\0".encode() if devices > 1 else b"", digest_size=8)
    if task == reranking.TASK:
        digest.update(b"rerank\0")
    elif embedding.embeds(folder, task):
        digest.update(b"embed\0")
    for path in sorted(folder.iterdir()):
        if path.suffix in _OF_A_GENERATION and path.is_file():
            stat = path.stat()  # that of the file that a link points to
            digest.update(f"{path.name}\0{stat.st_size}\0{stat.st_mtime_ns}\0{stat.st_ino}\0".encode())
    return (int.from_bytes(digest.digest(), "little") >> 1) or 1


def _check_kind(folder: Path) -> None:
    """Raises BrokenCheckpoint for what is no Hugging Face folder of a whole model, and names what it is."""
    if not folder.is_dir():
        if not folder.exists():
            raise PassingFault("its folder does not exist")
        kind = "a GGUF file, which is not supported" if folder.suffix.lower() == ".gguf" else "a file"
        raise BrokenCheckpoint(f"it is {kind}: give a Hugging Face folder with safetensors")
    if is_adapter(folder):
        raise BrokenCheckpoint(
            f"it is an adapter (LoRA){_base(folder)}, not a whole model: list it with base, the model it is for"
        )
    if (folder / "config.json").exists():
        return
    if (folder / "model_index.json").is_file():
        raise BrokenCheckpoint("it is a pipeline of diffusers (model_index.json), not a model of text")
    if (folder / "snapshots").is_dir():
        raise BrokenCheckpoint("it is a repository in Hugging Face's cache: give one of the folders in its snapshots")
    if (folder / "params.json").is_file():
        raise BrokenCheckpoint("it has its publisher's own format (params.json): give the Hugging Face folder")
    if (why := other_weights(os.listdir(folder))) is not None:
        raise BrokenCheckpoint(f"it has no config.json, and {why}")
    raise PassingFault("its folder is empty" if not any(folder.iterdir()) else "its folder has no config.json")


def _base(folder: Path) -> str:
    """The model that an adapter is for, as it says itself."""
    config = read_json(folder / "adapter_config.json")
    base = config.get("base_model_name_or_path") if isinstance(config, dict) else None
    # A path of the machine on which it was trained is of no use to a reader.
    return f" for {base}" if isinstance(base, str) and base and not base.startswith(("/", ".", "~")) else ""


def _with_small_kv(found: Checkpoint, dtype_bytes: int) -> Checkpoint:
    """A checkpoint whose KV has one byte a value instead of `dtype_bytes`. Raises BrokenCheckpoint on CPUs."""
    if dtype_bytes > _GPU_FLOAT_BYTES:
        raise BrokenCheckpoint('kv_dtype = "fp8" is for GPUs: engines on CPUs have no kernels for it')
    if found.architecture in CLASSES and CLASSES[found.architecture].latent:
        # FlashAttention's backend would convert the whole pool, mapped or not, in every layer of every step.
        raise BrokenCheckpoint('kv_dtype = "fp8" is not supported with latent attention: its rows are 16-bit')
    # States are no keys and values: they keep their floats.
    kinds = (replace(kind, bytes_per_token=kind.bytes_per_token // dtype_bytes) for kind in found.kv.kinds)
    return replace(found, kv=KvLayout(tuple(kinds)))


def _config(folder: Path) -> dict[str, Any]:
    """The object in config.json. Raises BrokenCheckpoint."""
    config = read_json(folder / "config.json")
    if not isinstance(config, dict):
        raise BrokenCheckpoint("config.json is not a JSON object")
    return config


def _check_config(
    config: Mapping[str, Any], dtype_bytes: int, devices: int, unverified: bool
) -> tuple[families.ModelShape, Quantisation | None]:
    """The shape of a model and how its weights are quantised. Raises BrokenCheckpoint if the model is refused whatever
    its weights are."""
    refused = encoders.refusal(config)
    if refused is None and not encoders.is_one(config):
        refused = families.refusal(config, unverified)
    if refused is not None:
        raise BrokenCheckpoint(refused)
    if encoders.is_one(config):
        shape = encoders.read_shape(config)
        if devices > 1:
            raise BrokenCheckpoint(f"{shape.architecture} is served by one device, not by {devices}")
        return shape, None
    verified = config["architectures"][0] in CLASSES
    shape = families.read_shape(config)
    _check_heads_divide(shape, config, devices)
    has_own_parts = shape.parts is not None and (shape.parts.embedding or shape.parts.own_kv < shape.layers)
    if devices > 1 and (has_own_parts or (verified and CLASSES[shape.architecture].states == MAMBA)):
        raise BrokenCheckpoint(f"this {shape.architecture} is served by one device, not by {devices}")
    if (mixture := families.mixture_of(config)) is not None:
        count, _ = families.experts_of(config, mixture)
        if count < devices:
            raise BrokenCheckpoint(f"{count} experts do not divide among {devices} devices")
    quantised = quantisation.read(config, families.text_config(config))
    if dtype_bytes > _GPU_FLOAT_BYTES and verified and CLASSES[shape.architecture].gpu_only:
        raise BrokenCheckpoint(f"{shape.architecture} is for GPUs: engines on CPUs have no kernels for it")
    if quantised is not None and mixture is not None:
        # SGLang's layers of other formats have places for a gate's weights, which nothing would fill.
        gateless = "" if mixture.gate or quantised.is_fp8 else "for experts without a gate in FP8 only"
        if no_kernels := gateless or quantised.no_mixtures:
            raise BrokenCheckpoint(f"its experts are quantised to {quantised.name}: kernels are {no_kernels}")
    if quantised is not None and dtype_bytes > _GPU_FLOAT_BYTES:
        raise BrokenCheckpoint(
            f"its weights are quantised ({quantised.name}), and engines on CPUs have no kernels for it"
        )
    return shape, quantised


def _check_heads_divide(shape: families.ModelShape, config: Mapping[str, Any], devices: int) -> None:
    """Raises BrokenCheckpoint if the heads of some layers do not divide among the devices. If there are fewer key-value
    heads than devices, several devices have the same head; heads of linear attention cannot be shared so."""
    for kv_heads in {shape.kv_heads, *([shape.full.kv_heads] if shape.full is not None else [])}:
        if shape.heads % devices or max(kv_heads, devices) % min(kv_heads, devices):
            raise BrokenCheckpoint(
                f"{shape.heads} attention heads with {kv_heads} key-value heads do not divide among {devices} devices"
            )
    keys, values = families.linear_heads(shape, config)
    if keys % devices or values % devices:
        raise BrokenCheckpoint(
            f"{values} value heads with {keys} key heads of linear attention do not divide among {devices} devices"
        )
    beside = families.heads_beside_text(config)
    if beside % devices:
        raise BrokenCheckpoint(f"the {beside} heads of its part for images do not divide among {devices} devices")


def _read(folder: Path, dtype_bytes: int, devices: int, task: str, generation: int, unverified: bool) -> Checkpoint:
    config = _config(folder)
    shape, quantised = _check_config(config, dtype_bytes, devices, unverified)
    if encoders.is_one(config):
        return _read_encoder(folder, config, shape, dtype_bytes, task, generation)
    verified = shape.architecture in CLASSES
    if verified:
        tensors = families.text_tensors(tensors_of(folder), shape)
        weights = families.expected_tensors(shape, config, families.has_joined(tensors, shape))
        expected = _check_tensors(tensors, weights, quantised)
        _check_divides(weights, expected, quantised, shape, config, devices)
        beside = families.held_beside(shape, config)
        held = {
            name: each
            for name, each in tensors.items()
            if name in expected or name in beside or families.beside_text(name, shape)
        }
    else:
        beside = {}
        held = tensors_of(folder)
        _check_scales(held)
    _check_tokenizer(folder)
    reranker = reranking.read(folder) if reranking.reranks(folder, task) else None
    embeds = reranker is None and embedding.embeds(folder, task)
    if embeds and verified and not CLASSES[shape.architecture].embeds:
        raise BrokenCheckpoint(
            f'engines make no embeddings with {shape.architecture}; task = "generate" in the catalogue is for its text'
        )
    embedding_made = embedding.read(folder, config, shape.hidden) if embeds else None
    no_adapters = _no_adapters(shape.architecture, quantised, embedding_made, devices)
    return replace(
        _sized(generation, config, shape, quantised, held, beside, dtype_bytes, devices),
        sampling=generation_defaults.read(folder),
        embedding=embedding_made,
        reranker=reranker,
        linears=() if no_adapters else _linears(weights),
        no_adapters=no_adapters,
    )


def _sized(
    generation: int,
    config: Mapping[str, Any],
    shape: families.ModelShape,
    quantised: Quantisation | None,
    held: Mapping[str, Tensor],
    beside: Mapping[str, tuple[int, ...]],
    dtype_bytes: int,
    devices: int,
) -> Checkpoint:
    """A model that makes text. `held`: tensors that engines load; `beside`: shapes of those that they hold as well."""
    nbytes = {
        name: _held_bytes(name, tensor, dtype_bytes, _parts(name, tensor.shape, shape, config, devices))
        for name, tensor in held.items()
    }
    for name, size in beside.items():
        if name not in nbytes:
            nbytes[name] = _aligned(-(-prod(size) * dtype_bytes // _parts(name, size, shape, config, devices)))
    known = CLASSES.get(shape.architecture)
    # A token reads one row of these.
    idle = nbytes.get(families.EMBEDDINGS_OF_LAYERS, 0)
    experts = sum(size for name, size in nbytes.items() if ".experts." in name)
    made = _made_bytes(shape, families.mixture_of(config), dtype_bytes, devices) if nbytes else 0
    text = families.text_config(config)
    padding = experts // _MXFP4_PADDING_DIVISOR if quantised is not None and quantised.layout == "mxfp4" else 0
    return Checkpoint(
        generation=generation,
        architecture=shape.architecture,
        context_tokens=shape.context_tokens,
        layers=shape.layers,
        kv_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        vocabulary=shape.vocabulary,
        weights_bytes=sum(nbytes.values()) + made + padding,
        active_bytes=sum(nbytes.values()) - idle - int(_idle_share(config) * experts),
        expert_share=1 - _idle_share(config),
        verified=known is not None,
        # Engines have one pool for all layers of a class that was never compared, even if it has windows.
        kv=kv_layout(config, dtype_bytes, devices, one_pool=known is None or not known.window_pool),
        quantisation=quantised.name if quantised is not None else "",
        position_bytes=rope_tables.row_bytes(shape, text),
    )


def _read_encoder(
    folder: Path, config: Mapping[str, Any], shape: families.ModelShape, dtype_bytes: int, task: str, generation: int
) -> Checkpoint:
    ranks = encoders.ranks(shape.architecture)
    if task not in ("", reranking.TASK if ranks else "embed"):
        makes = "ranks documents" if ranks else "makes embeddings"
        raise BrokenCheckpoint(f"{shape.architecture} {makes}: it cannot be listed with task = {task!r}")
    tensors = tensors_of(folder)
    expected = _check_tensors(tensors, encoders.expected_tensors(shape, config), None)
    _check_tokenizer(folder)
    nbytes = sum(_held_bytes(name, tensors[name], dtype_bytes, 1) for name in expected)
    return Checkpoint(
        generation=generation,
        architecture=shape.architecture,
        context_tokens=shape.context_tokens,
        layers=shape.layers,
        kv_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        vocabulary=shape.vocabulary,
        weights_bytes=nbytes,
        active_bytes=nbytes,
        kv=of_tokens(2 * shape.layers * shape.hidden * dtype_bytes),
        embedding=Embedding(1, pooling="pair") if ranks else embedding.read(folder, config, shape.hidden, encodes=True),
        reranker=Reranker() if ranks else None,
        no_adapters=_no_adapters(shape.architecture, None, None, 1),
    )


def _no_adapters(architecture: str, quantised: Quantisation | None, made: Embedding | None, devices: int) -> str:
    """Why adapters of a model are not served; empty: they are."""
    if architecture not in CLASSES or not CLASSES[architecture].adapters:
        return f"adapters of {architecture} are not served"
    if quantised is not None:
        return f"adapters of quantised weights ({quantised.name}) are not served"
    if made is not None:
        return "adapters of a model that makes embeddings are not served"
    # Each rank would decide by a clock of its own which adapter makes way for one that waits.
    return f"adapters of a model on {devices} devices are not served" if devices > 1 else ""


def _linears(weights: Mapping[str, tuple[int, ...]]) -> tuple[Linear, ...]:
    """The linear layers of the first decoder layer. All other decoder layers have linear layers of the same shapes."""
    first = "model.layers.0."
    named = {name.split(".")[-2]: size for name, size in weights.items() if name.startswith(first) and len(size) == 2}
    return tuple(Linear(name, named[name][0], named[name][1]) for name in MODULES)


def _check_scales(tensors: Mapping[str, Tensor]) -> None:
    """Raises BrokenCheckpoint for a weight of one byte without a scale. Of a class that is not in the table nothing
    else is known."""
    for name, tensor in tensors.items():
        layer, _, last = name.rpartition(".")
        if tensor.dtype in _ONE_BYTE and last == "weight":
            if not any(f"{layer}.{scale}" in tensors for scale in _WEIGHT_SCALES):
                raise BrokenCheckpoint(f"the weights lack {layer}.{_WEIGHT_SCALES[0]}, or a scale of another name")


def _idle_share(config: Mapping[str, Any]) -> float:
    """Share of a layer's experts that a token does not go through."""
    mixture = families.mixture_of(config)
    if mixture is None:
        return 0.0
    count, used = families.experts_of(config, mixture)
    return 1 - min(used, count) / count


def _check_tensors(
    tensors: Mapping[str, Tensor], weights: Mapping[str, tuple[int, ...]], quantised: Quantisation | None
) -> dict[str, QuantisedTensor]:
    """The tensors that a model with these weights has to have, by name. Raises BrokenCheckpoint if one of them is
    missing, or has another shape or type."""
    if quantised is not None and all(tensor.dtype in FLOATS for tensor in tensors.values()):
        raise BrokenCheckpoint(f"config.json says that the weights are quantised ({quantised.name}): none of them is")
    expected = _expected(tensors, weights, quantised)
    missing = [name for name in expected if name not in tensors]
    if missing:
        packed = next((name for name in tensors if name.endswith(_PACKED)), None)
        if quantised is None and packed is not None:
            raise BrokenCheckpoint(f"{tensors[packed].file}: {packed} is of a quantised layer: {_NOT_QUANTISED}")
        others = f" and {counted(len(missing) - 1, 'other tensor')}" if len(missing) > 1 else ""
        raise BrokenCheckpoint(f"the weights lack {missing[0]}{others}")
    for name, needed in expected.items():
        tensor = tensors[name]
        if tensor.shape not in needed.shapes:
            raise BrokenCheckpoint(
                f"{tensor.file}: {name} is {list(tensor.shape)} where config.json makes it {list(needed.shapes[0])}"
            )
        if tensor.dtype not in needed.dtypes:
            why = f"{quantised.name} has {' or '.join(sorted(needed.dtypes))}" if quantised else _NOT_QUANTISED
            raise BrokenCheckpoint(f"{tensor.file}: {name} is {tensor.dtype}: {why}")
    return expected


def _floats(weights: Mapping[str, tuple[int, ...]], quantised: Quantisation | None) -> dict[str, Tensor]:
    """Tensors of the weights that are floats as far as config.json tells."""
    return {
        name: Tensor(min(FLOATS), size, CONFIG)
        for name, size in weights.items()
        if quantised is None or (len(size) != 3 and not quantised.quantises(name))
    }


def _expected(
    tensors: Mapping[str, Tensor], weights: Mapping[str, tuple[int, ...]], quantised: Quantisation | None
) -> dict[str, QuantisedTensor]:
    """Tensors that a checkpoint has to have for these weights, by name. `tensors`: those that it has, which show the
    layers that are not quantised."""
    expected: dict[str, QuantisedTensor] = {}
    for name, size in weights.items():
        found = tensors.get(name)
        layer, _, last = name.rpartition(".")
        is_float = found is not None and found.dtype in FLOATS
        # Engines would take floats for quantised numbers in a layer that the configuration does not except.
        left = is_float and (quantised is None or quantised.may_be_float(name))
        if quantised is None or left or name in _VOCABULARY:
            expected[name] = QuantisedTensor((size,), FLOATS)
            continue
        if len(size) == 3 and last != "weight":
            expected |= {name + end: needed for end, needed in quantised.experts(*size).items()}
            continue
        if last != "weight" or len(size) != 2:
            expected[name] = QuantisedTensor((size,), FLOATS)
            continue
        try:
            layers_own = quantised.tensors(*size)
        except BrokenCheckpoint as error:
            raise BrokenCheckpoint(f"{layer}: {error}") from None
        expected |= {f"{layer}.{part}": needed for part, needed in layers_own.items()}
    return expected


def _check_divides(
    weights: Mapping[str, tuple[int, ...]],
    expected: Mapping[str, QuantisedTensor],
    quantised: Quantisation | None,
    shape: families.ModelShape,
    config: Mapping[str, Any],
    devices: int,
) -> None:
    """Raises BrokenCheckpoint for a layer that does not divide among devices, in whole blocks where it is quantised.
    The rows of a layer have to be whole blocks on a single device too, because engines join layers that have the same
    input (queries, keys and values; gate and up). `expected`: the tensors that the checkpoint has for these weights."""
    for name, size in weights.items():
        layer, _, last = name.rpartition(".")
        if len(size) == 3 and last == "down_proj" and size[1] % devices:
            raise BrokenCheckpoint(f"{layer}: its intermediate size {size[1]} does not divide among {devices} devices")
        if last != "weight" or len(size) != 2 or name in _VOCABULARY or layer.rpartition(".")[2] in _REPLICATED:
            continue
        by_columns = layer.endswith(_BY_COLUMNS)
        if by_columns and devices == 1 and (quantised is None or quantised.layout in ("plain", "mxfp4")):
            continue
        whole = size[1] if by_columns else size[0]
        parts = _parts(name, size, shape, config, devices)
        is_float = name in expected and expected[name].dtypes == FLOATS
        unit = 1 if quantised is None or is_float else quantised.unit(by_columns)
        if whole % (parts * unit):
            among = f" among {devices} devices" if devices > 1 else ""
            blocks = f" in blocks of {unit}" if unit > 1 else ""
            raise BrokenCheckpoint(f"{layer}: its {whole} {_SIDES[by_columns]} do not divide{among}{blocks}")


def _parts(
    name: str, size: tuple[int, ...], shape: families.ModelShape, config: Mapping[str, Any], devices: int
) -> int:
    """Number of parts into which a tensor is divided. If there are more devices, several have the same part."""
    module = name.rpartition(".")[0].rpartition(".")[2]
    if families.beside_text(name, shape) or module in _REPLICATED:
        return 1
    if module in ("k_proj", "v_proj"):
        return min(devices, families.kv_heads_of(name, shape, config))
    return 1 if len(size) == 1 and module not in _BY_HEAD else devices


def _held_bytes(name: str, tensor: Tensor, dtype_bytes: int, parts: int) -> int:
    """Bytes of a tensor that an engine lays out on one device, where it is divided into so many parts."""
    elements = tensor.elements
    if name.endswith(_PADDED) and len(tensor.shape) == 2:
        elements = -(-tensor.shape[0] // _VOCABULARY_ROWS) * _VOCABULARY_ROWS * tensor.shape[1]
    as_it_is = tensor.dtype not in FLOATS or (name.endswith(_SCALES) and not name.endswith(_FACTORS))
    nbytes = tensor.nbytes if as_it_is else elements * dtype_bytes
    return _aligned(-(-nbytes // parts))


def _aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGN_BYTES) * ALIGN_BYTES


def _made_bytes(shape: families.ModelShape, mixture: Experts | None, dtype_bytes: int, devices: int) -> int:
    """Bytes of the tensors that engines make of a model's weights and keep beside them, on each device."""
    made: tuple[int, ...] = () if shape.latent is None else latent.made(shape.latent, shape.heads // devices)
    if mixture is not None and mixture.router_scales:
        made += (shape.hidden,)  # the factors of the router's input, as those of a norm
    return shape.layers * sum(_aligned(elements * dtype_bytes) for elements in made)


def _check_tokenizer(folder: Path) -> None:
    for files in _TOKENIZERS:
        if all((folder / file).is_file() for file in files):
            break
    else:
        raise PassingFault("no tokenizer: neither tokenizer.json, tokenizer.model nor vocab.json with merges.txt")
    for file in files:
        if not file.endswith(".json"):
            with open(folder / file, "rb") as opened:
                first = opened.read(_FIRST_BYTES)
            if not first:
                raise PassingFault(f"{file} is empty")
            check_fetched(first, file)
        elif not isinstance(read_json(folder / file), dict):
            raise BrokenCheckpoint(f"{file} is not a JSON object")
