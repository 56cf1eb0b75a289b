"""The quantisation of a checkpoint's linear layers, by the quantization_config of its config.json, and the tensors that
a quantised layer has instead of its weight.

Sources: Transformers' and compressed-tensors' documentation of `quantization_config`, and the layouts of published
checkpoints. A kind that is not here is refused by name, before any memory is booked. The tensors themselves show which
layers are quantised: a weight of floats is of a layer that is not, and `quantization_config` has to except that layer.
"""

from __future__ import annotations

import reprlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Any

from loader.checkpoints.config_values import check_given
from loader.checkpoints.errors import BrokenCheckpoint
from loader.checkpoints.weight_files import FLOATS
from services.wording.json_values import NAMES, ValueKind

Shape = tuple[int, ...]
_FP8 = frozenset({"F8_E4M3"})
_INT8 = frozenset({"I8"})
_PACKED = frozenset({"I32"})
_BYTES = frozenset({"U8"})
_WORD_BITS = 32
_MXFP4_BLOCK = 32
"""Number of weights that share a scale."""
_SCALE: tuple[Shape, ...] = ((), (1,))
"""Shapes of a single scale."""
_KEY = "quantization_config"
_EXCEPTIONS = ("modules_to_not_convert", "ignored_layers", "ignore")
"""Keys of the layers that are not quantised."""
_LINEAR = ("_proj.weight", ".w1.weight", ".w2.weight", ".w3.weight")
"""Ends of the names of the weights that are quantised unless they are excepted; those of routers are not."""
_REGEX = "re:"
"""Beginning of an exception that is a regular expression. No regular expression of a checkpoint is run, since it may
take for ever."""
_NVFP4 = "it is quantised to NVFP4, which is not supported: it needs kernels of newer GPUs"
_NO_KERNELS = "for none of this kind"
_PLAIN_FORMATS = ("float-quantized", "int-quantized", "naive-quantized")
"""Formats of compressed-tensors in which a weight of one byte keeps its shape."""
_ANY = "*"
_KERNEL_ROWS, _KERNEL_COLUMNS = 64, 128
"""Rows and columns of which the kernels of packed weights take whole multiples on each device."""
_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxother = _SHORT.maxlong = 60
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
    """One kind of quantisation, with its sizes."""

    name: str
    """Name for people, such as "FP8" or "GPTQ with 4 bits"."""
    bits: int
    """Bits of a weight."""
    blocks: Shape = ()
    """(rows, columns) of a block that shares a scale; empty: scales are not for blocks."""
    group: int = 0
    """Number of columns of a row that share a scale; 0: all columns, or those of a block (`blocks`)."""
    layout: str = "plain"
    """Arrangement of weights. `plain`: of one byte each, in the shape of the layer's weight. `compressed`, `awq`,
    `gptq`: several in a word, as compressed-tensors, AWQ and GPTQ pack them. `mxfp4`: experts only, in blocks of 32
    with a scale of one byte."""
    scale: str = "weight_scale"
    """Name of the scales of a `plain` weight."""
    dtypes: frozenset[str] = _FP8
    """Types of a `plain` weight."""
    each_row: bool = False
    """Whether a `plain` weight has a scale for each row. If not, it has one in all, or one for each of its `blocks`."""
    static: bool = False
    """Whether the checkpoint has a scale for activations. If not, a step computes one, or activations stay floats."""
    zeros: bool = False
    """Whether `compressed` weights have zero points."""
    order: bool = False
    """Whether a `gptq` or `compressed` weight comes with an order of its columns."""
    excepted: tuple[str, ...] | None = None
    """Layers that are not quantised, by their names, by parts of these, or by patterns with "*" for any characters;
    None: it is not known, so it may be any layer."""
    no_mixtures: str = ""
    """Why mixtures of experts of this kind are not served, as the end of a sentence that begins "kernels are"; empty:
    they are served."""

    @property
    def is_fp8(self) -> bool:
        """Whether weights are of FP8, one byte each."""
        return self.layout == "plain" and self.dtypes == _FP8

    def may_be_float(self, name: str) -> bool:
        """Whether a weight may have been left as it is. Exceptions are taken widely. Packed weights have names of their
        own, and engines find one missing where a layer has floats."""
        if self.excepted is None or not name.endswith(_LINEAR):
            return True
        layer = name.removesuffix(".weight")
        return any(
            fnmatchcase(layer, each) if _ANY in each else each in name or layer in each for each in self.excepted
        )

    def quantises(self, name: str) -> bool:
        """Whether a weight is quantised as far as the configuration tells, which says nothing of the exceptions of
        packed weights."""
        return name.endswith(_LINEAR) and (self.excepted is None or not self.may_be_float(name))

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

    def unit(self, by_columns: bool) -> int:
        """Rows, or columns, of a layer that stay together where it is divided among devices."""
        if self.layout in ("plain", "mxfp4"):
            return self.blocks[by_columns] if self.blocks else 1
        return _KERNEL_COLUMNS if by_columns else _KERNEL_ROWS

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
    """The quantisation that a config.json describes; None if the model is not quantised. `text`: the part of
    config.json for the language model. Raises BrokenCheckpoint naming a kind or a value that is not served."""
    given = config.get(_KEY) or text.get(_KEY) or config.get("compression_config")
    if not given:
        return None
    if not isinstance(given, dict):
        raise BrokenCheckpoint(f"config.json: {_KEY} is not an object")
    kind = _kind(
        given, text.get("dtype") or text.get("torch_dtype") or config.get("dtype") or config.get("torch_dtype")
    )
    return kind if kind.layout != "plain" else replace(kind, excepted=_excepted(given))


def _excepted(given: Mapping[str, Any]) -> tuple[str, ...] | None:
    _check(given, dict.fromkeys(_EXCEPTIONS, NAMES))
    named = tuple(each for key in _EXCEPTIONS for each in given.get(key) or ())
    groups = given["config_groups"].values() if given.get("quant_method") == "compressed-tensors" else ()
    if not all(group.get("targets") == ["Linear"] for group in groups):
        return None
    found = [_pattern(each) if each.startswith(_REGEX) else each for each in named]
    return None if None in found else tuple(_of_text(each) for each in found if each is not None)


def _pattern(regex: str) -> str | None:
    """The pattern with "*" that means the same as a regular expression; None if the expression has more than ".*",
    dots, "^" and "$"."""
    text = regex.removeprefix(_REGEX).removeprefix("^").replace(r"\.", ".")
    ends = text.endswith("$")
    parts = text.removesuffix("$").split(".*")
    if any(set(part) & set("[](){}|?+*\\^$") for part in parts):
        return None
    return _ANY.join(parts) + ("" if ends else _ANY)


def _of_text(name: str) -> str:
    """The name of a layer as in a model of text alone, from its name in a wrapper."""
    return name.replace("language_model.model.", "model.").replace("model.language_model.", "model.")


def _kind(given: Mapping[str, Any], dtype: Any) -> Quantisation:
    method = given.get("quant_method")
    if method == "fp8":
        return _fp8(given)
    if method is None:
        raise BrokenCheckpoint(f"config.json: {_KEY} has no quant_method")
    if method == "awq":
        _need(given, "bits", "zero_point")
        _check(given, {"bits": _only(4), "version": _only("gemm", "GEMM"), "zero_point": _only(True)})
        return Quantisation("AWQ with 4 bits", 4, group=_group(given), layout="awq")
    if method == "gptq":
        _need(given, "bits", "sym", "desc_act")
        _check(given, {"bits": _only(4, 8), "sym": _only(True), "checkpoint_format": _only("gptq", "")})
        if given.get("dynamic"):
            raise BrokenCheckpoint("it is quantised by GPTQ with other bits for some layers, which is not supported")
        bits = int(given["bits"])
        half = "" if dtype != "bfloat16" else "for float16, and not for bfloat16 as config.json says"
        return Quantisation(
            f"GPTQ with {bits} bits", bits, group=_group(given), layout="gptq", order=True, no_mixtures=half
        )
    if method == "compressed-tensors":
        return _compressed(given)
    if method == "mxfp4":
        return Quantisation("MXFP4", 4, layout="mxfp4")
    if str(method).startswith("modelopt") and "FP4" in str(given.get("quant_algo", method)).upper():
        raise BrokenCheckpoint(_NVFP4)
    raise BrokenCheckpoint(
        f"it is quantised by {_SHORT.repr(method)}, which is not supported; these methods are: {', '.join(METHODS)}"
    )


def _fp8(given: Mapping[str, Any]) -> Quantisation:
    _need(given, "activation_scheme")
    _check(given, {"activation_scheme": _only("dynamic", "static")})
    if given.get("weight_block_size") is None:
        return Quantisation("FP8", 8, static=given.get("activation_scheme") == "static")
    _check(given, {"activation_scheme": _only("dynamic")})
    return Quantisation("FP8 in blocks", 8, blocks=_blocks(given, "weight_block_size"), scale="weight_scale_inv")


def _blocks(given: Mapping[str, Any], key: str) -> Shape:
    blocks = given.get(key)
    if not (isinstance(blocks, list) and len(blocks) == 2 and all(type(size) is int and size > 0 for size in blocks)):
        raise BrokenCheckpoint(f"config.json: {_KEY}: {key} is {_SHORT.repr(blocks)}, not two numbers above 0")
    return (blocks[0], blocks[1])


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
        raise BrokenCheckpoint(_NVFP4)
    if activations is not None and not isinstance(activations, dict):
        raise BrokenCheckpoint(f"config.json: {_KEY}: input_activations is not an object")
    like_weights = activations is None or (activations.get("type"), activations.get("num_bits")) == (kind, bits)
    dynamic = activations is None or activations.get("dynamic") in (True, "token")
    plain = like_weights and given.get("format") in _PLAIN_FORMATS
    each_row = strategy == "channel"
    if (kind, bits) == ("float", 8) and plain and strategy in ("tensor", "channel"):
        # A scale a row goes with inputs that have one a token, a scale a tensor with inputs whose scale is fixed.
        inputs = {} if activations is None else activations
        mixtures = inputs and (dynamic and inputs.get("strategy") == "token" if each_row else not dynamic)
        return Quantisation(
            "FP8", 8, each_row=each_row, static=not dynamic, no_mixtures="" if mixtures else _NO_KERNELS
        )
    if (kind, bits, strategy) == ("float", 8, "block") and plain and activations is not None and dynamic:
        return Quantisation("FP8 in blocks", 8, blocks=_blocks(weights, "block_structure"))
    if (kind, bits) == ("int", 8) and plain and activations is not None and strategy in ("tensor", "channel"):
        _check(weights, {"symmetric": _only(True)})
        return Quantisation("INT8", 8, dtypes=_INT8, each_row=each_row, static=not dynamic, no_mixtures=_NO_KERNELS)
    packed = activations is None and given.get("format") == "pack-quantized"
    if kind == "int" and bits in (4, 8) and packed and strategy in ("group", "channel"):
        return Quantisation(
            f"INT{bits} weights",
            int(bits),
            group=_group(weights) if strategy == "group" else 0,
            layout="compressed",
            zeros=weights.get("symmetric") is False,
            order=weights.get("actorder") == "group",
        )
    with_ = "" if activations is None else " and activations"
    kind, bits, strategy, form = (_SHORT.repr(each) for each in (kind, bits, strategy, given.get("format")))
    raise BrokenCheckpoint(
        f"it is quantised by compressed-tensors to {kind} weights{with_} of {bits} bits by {strategy} in the format"
        f" {form}, which is not supported"
    )


def _group(given: Mapping[str, Any]) -> int:
    size = given.get("group_size")
    if size == -1:
        return 0
    if size is None:
        raise BrokenCheckpoint(f"config.json: {_KEY} has no group_size")
    _check(given, {"group_size": _only(-1, 32, 64, 128)})
    return int(size)


def _need(given: Mapping[str, Any], *keys: str) -> None:
    for key in keys:
        if given.get(key) is None:
            raise BrokenCheckpoint(f"config.json: {_KEY} has no {key}")


def _check(given: Mapping[str, Any], kinds: Mapping[str, ValueKind]) -> None:
    check_given("config.json", given, kinds, _KEY)


def _only(*values: Any) -> ValueKind:
    """The kind of these values, which are the ones that are served among others that exist."""
    named = (str(value).lower() if isinstance(value, bool) else str(value) for value in values if value != "")
    return ValueKind(f"{' or '.join(named)}, which alone is supported", lambda value: value in values)
