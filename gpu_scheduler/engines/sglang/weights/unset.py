"""Parameters that a checkpoint does not set. SGLang leaves them as they were created, which is arbitrary memory, so all
are marked before the checkpoint is read.

The mark of floats is NaN: a value that is NaN in the checkpoint is as bad as one that is missing. Types of one byte and
integers have no value to spare; their mark is a pattern of 16 bytes that no checkpoint has by chance.
"""

from __future__ import annotations

from typing import Any

import torch

_PATTERN = (0x5BC1_94E2_7D03_A86F, -0x1E57_3B0C_46D9_F283)
"""Two words of 64 bits; as FP8 none of their bytes is NaN."""
_WORDS = len(_PATTERN)
_CHUNK = (64 << 20) // 16
"""Patterns that are compared at a time: the comparison takes memory of its own."""
_OPTIONAL = ("scale", "g_idx", "g_idx_sort_indices")
"""Ends of the names of parameters that a checkpoint may lack, because they have meaningful defaults. Parameters among
them that a checkpoint has to have all the same are looked for by name before
(`loader/checkpoints/architectures/quantisation.py`)."""


_UNUSED = "position_ids"
"""Parameter of SGLang's encoders that newer checkpoints do not have."""


def set_by_checkpoint(model: torch.nn.Module) -> dict[str, torch.nn.Parameter]:
    """The parameters that a checkpoint has to set wholly, by name. Those of layers that SGLang widens for its kernels
    are not among them: what a checkpoint does not have of them is zero."""
    return {
        f"{prefix}.{name}" if prefix else name: parameter
        for prefix, module in model.named_modules()
        if not _is_widened(module)
        for name, parameter in module.named_parameters(recurse=False)
        if not name.endswith(_OPTIONAL) and not getattr(parameter, "_skip_weight_check", False)
    }


def _is_widened(module: torch.nn.Module) -> bool:
    method = getattr(module, "quant_method", None)
    return any(getattr(method, name, 0) for name in ("hidden_pad", "intermediate_pad"))


def mark(model: torch.nn.Module) -> dict[str, torch.nn.Parameter]:
    """Marks all values of the parameters that a checkpoint has to set; returns those that could be marked."""
    return {name: parameter for name, parameter in set_by_checkpoint(model).items() if _mark(parameter)}


def fill_unused(model: torch.nn.Module) -> None:
    """Sets the parameters that SGLang's models have and no step reads, which a checkpoint may lack: a table of
    encoders, and projections to keys and values in layers that use those of other layers."""
    for name, parameter in model.named_parameters():
        if name.rpartition(".")[2] == _UNUSED:
            parameter.data.zero_()
    attentions: list[Any] = [each for each in model.modules() if getattr(each, "is_kv_shared_layer", False)]
    for attention in attentions:
        projection = getattr(attention.qkv_proj, "weight", None)
        if projection is not None:  # packed weights have other names, and checkpoints with them have all of it
            projection.data[attention.q_size :].zero_()
        attention.k_norm.weight.data.zero_()


def is_marked(parameter: torch.nn.Parameter) -> bool:
    """Whether any value of a parameter bears the mark still."""
    if has_nan(parameter):
        return bool(torch.isnan(parameter).any())
    words = _words(parameter)
    if words is None:
        return False
    pattern = torch.tensor(_PATTERN, dtype=torch.int64, device=words.device)
    return any(bool((part == pattern).all(dim=1).any()) for part in words.split(_CHUNK))


def _mark(parameter: torch.nn.Parameter) -> bool:
    if has_nan(parameter):
        parameter.data.fill_(torch.nan)
        return True
    words = _words(parameter)
    if words is None:
        return False
    words.copy_(torch.tensor(_PATTERN, dtype=torch.int64, device=words.device).expand_as(words))
    return True


def has_nan(parameter: torch.nn.Parameter) -> bool:
    """Whether the parameter's mark is NaN, which a checkpoint's values may be too."""
    return parameter.is_floating_point() and parameter.element_size() > 1


def _words(parameter: torch.nn.Parameter) -> torch.Tensor | None:
    """The parameter's bytes as (patterns, 2) words, a view; None if it is no whole number of patterns, has gaps, or
    begins within a word of its storage."""
    data = parameter.data
    if not data.is_contiguous() or not data.numel() or data.numel() * data.element_size() % (8 * _WORDS):
        return None
    if data.storage_offset() * data.element_size() % 8:
        return None
    return data.view(-1).view(torch.uint8).view(torch.int64).view(-1, _WORDS)
