"""How a checkpoint's linear layers are quantised, by the quantization_config of its config.json, and which tensors each
of them has instead of its weight.

Sources: Transformers' and compressed-tensors' documentation of `quantization_config`, and the layouts of published
checkpoints. A kind that is not here is refused by name, before any memory is booked. Which layers are quantised the
tensors say themselves: a weight of floats is one that was left as it is.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from loader.checkpoints.config_values import check_given
from loader.checkpoints.errors import BrokenCheckpoint
from loader.checkpoints.weight_files import FLOATS
from services.wording.values import COUNT, ValueKind

Shape = tuple[int, ...]
_FP8 = frozenset({"F8_E4M3"})
_INT8 = frozenset({"I8"})
_PACKED = frozenset({"I32"})
_BYTES = frozenset({"U8"})
_WORD_BITS = 32
_MXFP4_BLOCK = 32
"""Weights that share a scale."""
_SCALE: tuple[Shape, ...] = ((), (1,))
"""Shapes of a single scale."""
_KEY = "quantization_config"
METHODS = ("fp8", "awq", "gptq", "compressed-tensors", "mxfp4")
"""Values of `quant_method` that are served."""


@dataclass(frozen=True)
class QuantisedTensor:
    """A tensor that a quantised layer has to have."""

    shapes: tuple[Shape, ...]
    """The shapes that it may have."""
    dtypes: frozenset[str]
    """The types that it may have, by their names in safetensors files."""


@dataclass(frozen=True)
class Quantisation:
    """One kind, with its sizes."""

    name: str
    """For people: "FP8", "GPTQ with 4 bits"."""
    bits: int
    """Bits of a weight."""
    blocks: Shape = ()
    """Rows and columns that share a scale where rows do too; empty: none do."""
    group: int = 0
    """Columns of a row that share a scale; 0: all, or `blocks` says it."""
    layout: str = "plain"
    """`plain`: a weight of one byte in its own shape; `compressed`, `awq`, `gptq`: several in a word, as these write
    it; `mxfp4`: experts only, blocks of 32 with a scale of one byte."""
    scale: str = "weight_scale"
    """Name of the scales of a `plain` weight."""
    dtypes: frozenset[str] = _FP8
    """Types of a `plain` weight."""
    each_row: bool = False
    """Whether a `plain` weight has a scale for each row; else it has one, unless `blocks` says otherwise."""
    static: bool = False
    """Whether activations have a scale in the checkpoint."""
    zeros: bool = False
    """Whether `compressed` weights have zero points."""
    order: bool = False
    """Whether `gptq` and `compressed` weights have their columns in an order of their own."""

    def tensors(self, rows: int, columns: int) -> dict[str, QuantisedTensor]:
        """Tensors of a linear layer by the last part of their names. Raises BrokenCheckpoint if the layer's shape does
        not suit the format."""
        if self.layout == "mxfp4":
            return {"weight": _one((rows, columns), FLOATS)}
        if self.layout == "plain":
            return self._plain(rows, columns)
        pack, group = _WORD_BITS // self.bits, self.group or columns
        groups = _parts(columns, group, "columns", "groups")
        if self.layout == "awq":
            words = _parts(rows, pack, "rows", "words")
            return {
                "qweight": _one((columns, words), _PACKED),
                "qzeros": _one((groups, words), _PACKED),
                "scales": _one((groups, rows), FLOATS),
            }
        if self.layout == "gptq":
            return {
                "qweight": _one((_parts(columns, pack, "columns", "words"), rows), _PACKED),
                "qzeros": _one((groups, _parts(rows, pack, "rows", "words")), _PACKED),
                "scales": _one((groups, rows), FLOATS),
            } | ({"g_idx": _one((columns,), _PACKED)} if self.order else {})
        packed = {
            "weight_packed": _one((rows, _parts(columns, pack, "columns", "words")), _PACKED),
            "weight_scale": _one((rows, groups), FLOATS),
            "weight_shape": _one((2,), frozenset({"I64", "I32"})),
        }
        if self.zeros:
            packed["weight_zero_point"] = _one((_parts(rows, pack, "rows", "words"), groups), _PACKED)
        if self.order:
            packed["weight_g_idx"] = _one((columns,), _PACKED)
        return packed

    def experts(self, count: int, columns: int, rows: int) -> dict[str, QuantisedTensor]:
        """Tensors of a layer's experts that are joined, by what is added to their name. Raises BrokenCheckpoint."""
        if self.layout != "mxfp4":
            raise BrokenCheckpoint(f"its experts are quantised to {self.name}, which is not supported for this class")
        blocks = _parts(columns, _MXFP4_BLOCK, "columns", "blocks")
        return {
            "_blocks": _one((count, rows, blocks, _MXFP4_BLOCK // 2), _BYTES),
            "_scales": _one((count, rows, blocks), _BYTES),
        }

    def _plain(self, rows: int, columns: int) -> dict[str, QuantisedTensor]:
        scales: tuple[Shape, ...] = _SCALE
        if self.blocks:
            scales = ((-(-rows // self.blocks[0]), -(-columns // self.blocks[1])),)
        elif self.each_row:
            scales = ((rows, 1), (rows,))
        found = {"weight": _one((rows, columns), self.dtypes), self.scale: QuantisedTensor(scales, FLOATS)}
        return found | ({"input_scale": QuantisedTensor(_SCALE, FLOATS)} if self.static else {})


def _one(shape: Shape, dtypes: frozenset[str]) -> QuantisedTensor:
    return QuantisedTensor((shape,), dtypes)


def _parts(whole: int, part: int, what: str, of: str) -> int:
    if whole % part:
        raise BrokenCheckpoint(f"a quantised layer's {whole} {what} do not divide into {of} of {part}")
    return whole // part


def read(config: Mapping[str, Any], text: Mapping[str, Any]) -> Quantisation | None:
    """The quantisation that a config.json describes, `text` being its part for the language model; None if the model is
    not quantised. Raises BrokenCheckpoint naming a kind or a value that is not served."""
    given = config.get(_KEY) or text.get(_KEY) or config.get("compression_config")
    if not given:
        return None
    if not isinstance(given, dict):
        raise BrokenCheckpoint(f"config.json: {_KEY} is not an object")
    method = given.get("quant_method")
    if method == "fp8":
        return _fp8(given)
    if method == "awq":
        _check(given, {"bits": _only(4), "version": _only("gemm", "GEMM"), "zero_point": _only(True)})
        return Quantisation("AWQ with 4 bits", 4, group=_group(given), layout="awq")
    if method == "gptq":
        _check(given, {"bits": _only(4, 8), "sym": _only(True), "checkpoint_format": _only("gptq", "")})
        if given.get("dynamic"):
            raise BrokenCheckpoint("it is quantised by GPTQ with other bits for some layers, which is not supported")
        bits = int(given.get("bits", 4))
        return Quantisation(f"GPTQ with {bits} bits", bits, group=_group(given), layout="gptq", order=True)
    if method == "compressed-tensors":
        return _compressed(given)
    if method == "mxfp4":
        return Quantisation("MXFP4", 4, layout="mxfp4")
    raise BrokenCheckpoint(
        f"it is quantised by {method!r}, which is not supported; these methods are: {', '.join(METHODS)}"
    )


def _fp8(given: Mapping[str, Any]) -> Quantisation:
    _check(given, {"activation_scheme": _only("dynamic", "static")})
    static = given.get("activation_scheme") == "static"
    if given.get("weight_block_size") is None:
        return Quantisation("FP8", 8, static=static)
    blocks = given["weight_block_size"]
    if not (isinstance(blocks, list) and len(blocks) == 2 and all(type(size) is int and size > 0 for size in blocks)):
        raise BrokenCheckpoint(f"config.json: {_KEY}.weight_block_size is {blocks!r}, not two numbers above 0")
    return Quantisation("FP8 in blocks", 8, blocks=(blocks[0], blocks[1]), scale="weight_scale_inv", static=static)


def _compressed(given: Mapping[str, Any]) -> Quantisation:
    groups = given.get("config_groups")
    if not isinstance(groups, dict) or not groups:
        raise BrokenCheckpoint(f"config.json: {_KEY} has no config_groups")
    if len(groups) > 1:
        raise BrokenCheckpoint(f"it is quantised in {len(groups)} ways at once (config_groups), which is not supported")
    (group,) = groups.values()
    weights = group.get("weights") if isinstance(group, dict) else None
    if not isinstance(weights, dict):
        raise BrokenCheckpoint(f"config.json: {_KEY}.config_groups does not say how weights are quantised")
    kind, bits, strategy = weights.get("type"), weights.get("num_bits"), weights.get("strategy")
    activations = group.get("input_activations")
    if (kind, bits) == ("float", 4):
        raise BrokenCheckpoint("it is quantised to NVFP4, which is not supported: it needs kernels of newer GPUs")
    dynamic = activations is None or (isinstance(activations, dict) and activations.get("dynamic") in (True, "token"))
    if (kind, bits) == ("float", 8) and strategy in ("tensor", "channel", "block"):
        blocks = tuple(weights.get("block_structure") or (128, 128)) if strategy == "block" else ()
        return Quantisation(
            "FP8 in blocks" if blocks else "FP8", 8, blocks=blocks, each_row=strategy == "channel", static=not dynamic
        )
    if (kind, bits) == ("int", 8) and activations is not None and strategy in ("tensor", "channel"):
        return Quantisation("INT8", 8, dtypes=_INT8, each_row=strategy == "channel", static=not dynamic)
    if kind == "int" and bits in (4, 8) and activations is None and strategy in ("group", "channel"):
        return Quantisation(
            f"INT{bits} weights",
            int(bits),
            group=_group(weights) if strategy == "group" else 0,
            layout="compressed",
            zeros=weights.get("symmetric") is False,
            order=weights.get("actorder") == "group",
        )
    with_ = "" if activations is None else " and activations"
    raise BrokenCheckpoint(
        f"it is quantised by compressed-tensors to {kind} weights{with_} of {bits} bits by {strategy}, which is not"
        " supported"
    )


def _group(given: Mapping[str, Any]) -> int:
    size = given.get("group_size")
    if size == -1:
        return 0
    _check(given, {"group_size": COUNT})
    if size is None:
        raise BrokenCheckpoint(f"config.json: {_KEY} has no group_size")
    return int(size)


def _check(given: Mapping[str, Any], kinds: Mapping[str, ValueKind]) -> None:
    check_given("config.json", given, kinds, _KEY)


def _only(*values: Any) -> ValueKind:
    """The values that are served; others exist."""
    named = (str(value).lower() if isinstance(value, bool) else str(value) for value in values if value != "")
    return ValueKind(f"{' or '.join(named)}, which alone is supported", lambda value: value in values)
