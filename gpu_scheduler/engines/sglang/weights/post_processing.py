"""Processing of a model's weights by SGLang once they are read: quantised layers are laid out for their kernels.

SGLang does this layer by layer. A layer's new tensors take the places in the weights range that its old ones had, or
those of a layer before it, so that the range never holds much more than the model; tensors larger than those that they
replace find no such place, and the range holds both until it is closed up. Some layers keep tensors beside
their parameters, in attributes or in objects of their own: they belong to the weights and go into the range too, under
the name of the attribute. An image has them, therefore, and they leave while the model sleeps. The range also has the
tensors that a model makes of its weights as they are read (latent attention's projections, split for keys and for
values) or would make of them at its first step (the factors of a router's input, folded into a norm).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from gpu_scheduler.engines.sglang.base.errors import BrokenModel
from gpu_scheduler.engines.sglang.policy.tensor_spans import Span
from gpu_scheduler.engines.sglang.weights.weights_range import MappedWeights

_DEPTH = 4
"""Objects between a module and a tensor that it keeps: quantisation method, scheme, kernel, packed tensor."""
_SCRATCH = "workspace"
"""End of the names of memory that kernels use and leave as it was: it holds nothing of the weights."""


_LEAVES = ("builtins", "torch", "functools", "types", "enum")
"""Beginnings of the modules whose objects keep no tensors of a layer."""


def process(model: torch.nn.Module, range_: MappedWeights) -> None:
    """Has SGLang process the weights of each layer, in SGLang's own order, and moves the tensors that it makes into the
    range, with those that a model has made of its weights as they were read. Raises BrokenModel for a tensor that
    cannot lie there, NoMemory."""
    if hasattr(model, "post_load_weights"):
        _adopt_made(model, range_)
    _fold_scales(model, range_)
    # A tensor that was made of a layer's weights may be a view of them.
    made = [span for each in range_.others.values() if (span := range_.span(each)) is not None]
    shared = [*_shared(model, range_), *made]
    for name, module in model.named_modules():
        if getattr(module, "quant_method", None) is not None:
            _process_layer(name, module, range_, shared)


def make(model: torch.nn.Module) -> None:
    """Has a model whose weights are not read make the tensors that SGLang's models make of their weights in the course
    of reading. The values mean nothing; the places and shapes are as after reading."""
    if hasattr(model, "post_load_weights"):
        model.post_load_weights()  # type: ignore[operator]


def _fold_scales(model: torch.nn.Module, range_: MappedWeights) -> None:
    """Has routers with a factor for each element of their input (Gemma 4) fold it into the norm before them, in the
    range. SGLang does so at a router's first step: for a model that comes up from its image this may be a step in which
    a CUDA graph is captured, before the weights are here. On CPUs its norm uses such factors only where it is told
    so."""
    for name, module in model.named_modules():
        if hasattr(module, "fuse_scale"):
            module.fuse_scale()
            module.norm.with_scale = True
            if range_.span(module.norm.weight) is None:
                _adopt(f"{name}.norm.weight", module.norm.weight, {"weight": module.norm.weight}, range_)
            range_.others[f"{name}.norm.weight"] = module.norm.weight


def _adopt_made(model: torch.nn.Module, range_: MappedWeights) -> None:
    """Moves the tensors that modules have made of their weights, as plain attributes, into the range: the projections
    of latent attention (MLA), split for keys and for values."""
    device = range_.memory.device
    for name, module in model.named_modules():
        own = {id(each) for each in (*module._parameters.values(), *module._buffers.values())}
        made = {
            path: each
            for path, each in vars(module).items()
            if isinstance(each, torch.Tensor) and each.device == device and each.numel() and id(each) not in own
        }
        for path, tensor in made.items():
            full = f"{name}.{path}" if name else path
            if range_.span(tensor) is None:
                _adopt(full, tensor, made, range_)
            range_.others[full] = tensor


def _shared(model: torch.nn.Module, range_: MappedWeights) -> list[Span]:
    """Places of parameters that several layers have: one that replaces its own leaves the others theirs."""
    held = [each for module in model.modules() for each in module._parameters.values() if each is not None]
    times = Counter(map(id, held))
    return [span for each in held if times[id(each)] > 1 and (span := range_.span(each)) is not None]


def _process_layer(name: str, module: torch.nn.Module, range_: MappedWeights, shared: Sequence[Span]) -> None:
    device = range_.memory.device
    before = [tensor for _, tensor in _tensors(module, device)]
    spans = [span for tensor in before if (span := range_.span(tensor)) is not None]
    storages = [tensor.untyped_storage() for tensor in before if range_.span(tensor) is None]
    # They are held until the end, so that none of the new ones has the address of an old one.
    elsewhere = {storage.data_ptr() for storage in storages}
    del before
    method: Any = module.quant_method
    range_.born.clear()
    method.process_weights_after_loading(module)
    spans += [span for parameter, span in range_.born if parameter() is None]  # those of steps between
    after = dict(_tensors(module, device))
    kept = [span for tensor in after.values() if (span := range_.span(tensor)) is not None]
    range_.places.release(spans, [*kept, *shared])
    for path, tensor in after.items():
        if tensor.numel() and range_.span(tensor) is None and not path.endswith(_SCRATCH):
            if tensor.untyped_storage().data_ptr() not in elsewhere:
                _adopt(f"{name}.{path}", tensor, after, range_)
    own = {id(each) for each in (*module._parameters.values(), *module._buffers.values())}
    for path, tensor in after.items():
        if id(tensor) not in own and range_.span(tensor) is not None:
            range_.others[f"{name}.{path}"] = tensor


def _adopt(name: str, tensor: torch.Tensor, layer: Mapping[str, torch.Tensor], range_: MappedWeights) -> None:
    """Moves a tensor, and those of the layer that share its storage, into the range."""
    storage = tensor.untyped_storage()
    sharing = [each for each in layer.values() if each.untyped_storage().data_ptr() == storage.data_ptr()]
    start = range_.take(storage, copy=True)
    try:
        for each in {id(each): each for each in sharing}.values():
            range_.adopt(each, start)
    except RuntimeError as error:  # torch refuses other memory for a tensor of a class of its own
        raise BrokenModel(f"{name} cannot lie among the weights: {error}") from None


def _tensors(module: torch.nn.Module, device: torch.device) -> Iterator[tuple[str, torch.Tensor]]:
    """Tensors of one module on the device by the path of attributes to each: its parameters and buffers, and what it
    and its quantisation method keep beside them; not those of modules within it."""
    for name, value in (*module._parameters.items(), *module._buffers.items()):
        if value is not None and value.device == device:
            yield name, value
    attributes = {name: value for name, value in vars(module).items() if not name.startswith("_")}
    yield from _kept("", attributes, device, _DEPTH, {id(module)})


def _kept(
    path: str, value: Any, device: torch.device, depth: int, seen: set[int]
) -> Iterator[tuple[str, torch.Tensor]]:
    if isinstance(value, torch.Tensor):
        if value.device == device:
            yield path, value
        return
    if depth < 0 or id(value) in seen or isinstance(value, torch.nn.Module):
        return
    if isinstance(value, dict):
        children = {str(key): each for key, each in value.items()}
    elif isinstance(value, (list, tuple)):
        children = {str(number): each for number, each in enumerate(value)}
    elif not type(value).__module__.startswith(_LEAVES) and hasattr(value, "__dict__"):
        children = vars(value)
    else:
        return
    seen.add(id(value))
    for name, child in children.items():
        yield from _kept(f"{path}.{name}" if path else name, child, device, depth - 1, seen)
