"""What a quantisation method makes of a layer's weights: values, places, names; with plain torch modules."""

from __future__ import annotations

from collections.abc import Callable
from operator import attrgetter
from typing import Any

import pytest
import torch

from gpu_scheduler.engines.sglang.base.errors import BrokenModel
from gpu_scheduler.engines.sglang.weights import post_processing, weights_range
from gpu_scheduler.engines.sglang.weights.weights_range import ALIGN_BYTES, MappedWeights

ROWS, COLUMNS = 64, 96
LAYER_BYTES = ROWS * COLUMNS + 4 * ROWS
RANGE_BYTES = 1 << 20
LAYERS = 5


class Method:
    """Leaves a layer as it was read."""

    makes: tuple[str, ...] = ("weight", "weight_scale")
    """Paths of the layer's tensors that belong to its weights afterwards."""

    def process_weights_after_loading(self, layer: Any) -> None:
        pass


class Repacks(Method):
    """A new parameter of another shape takes the place of one that is deleted, in memory of the method's own."""

    makes = ("packed", "weight_scale")

    def process_weights_after_loading(self, layer: Any) -> None:
        packed = layer.weight.data.t().reshape(COLUMNS // 4, 4, ROWS).transpose(1, 2).contiguous()
        layer.register_parameter("packed", torch.nn.Parameter(packed, requires_grad=False))
        del layer.weight


class Rebuilds(Repacks):
    """The same, made so that it lies in the range while the parameter that it replaces still does."""

    def process_weights_after_loading(self, layer: Any) -> None:
        layer.packed = torch.nn.Parameter(
            layer.weight.data.t().reshape(COLUMNS // 4, 4, ROWS).transpose(1, 2).contiguous(), requires_grad=False
        )
        del layer.weight


class Passes(Repacks):
    """A parameter between the first and the last one, which no layer has before or afterwards."""

    def process_weights_after_loading(self, layer: Any) -> None:
        layer.weight = torch.nn.Parameter(layer.weight.data.t().contiguous(), requires_grad=False)
        layer.packed = torch.nn.Parameter(
            layer.weight.data.reshape(COLUMNS // 4, 4, ROWS).transpose(1, 2).contiguous(), requires_grad=False
        )
        del layer.weight


class Widens(Method):
    """The new parameter is twice as large."""

    makes = ("wide", "weight_scale")

    def process_weights_after_loading(self, layer: Any) -> None:
        layer.wide = torch.nn.Parameter(layer.weight.data.to(torch.float16), requires_grad=False)
        del layer.weight


class Folds(Method):
    """Both parameters become one, and a number stays outside of tensors."""

    makes = ("weight",)

    def process_weights_after_loading(self, layer: Any) -> None:
        layer.k_scale_float = float(layer.weight_scale.data.max())
        layer.weight = torch.nn.Parameter(layer.weight.data * layer.weight_scale.data, requires_grad=False)
        del layer.weight_scale


class Kernel:
    """An object of a method, as those that SGLang's methods choose for a layer."""

    def __init__(self, **kept: Any) -> None:
        self.__dict__ |= kept


class Strays(Method):
    """Tensors beside the parameters: an attribute, one in an object of the method, one in a list of that object."""

    makes = (
        "weight",
        "weight_scale",
        "halves",
        "quant_method.kernel.sums",
        "quant_method.kernel.parts.0",
        "quant_method.kernel.parts.1",
    )

    def process_weights_after_loading(self, layer: Any) -> None:
        layer.halves = layer.weight_scale.data / 2
        parts = layer.weight.data.float().chunk(2)
        self.kernel = Kernel(
            sums=layer.weight.data.sum(dim=1), parts=[part * 1.5 for part in parts], scheme=Kernel(name="test")
        )


class Scratch(Method):
    """Memory that kernels use, and that holds nothing of the weights."""

    def process_weights_after_loading(self, layer: Any) -> None:
        layer.workspace = torch.zeros(512, dtype=torch.int32)
        self.kernel = Kernel(marlin_workspace=torch.zeros(512))


class Turns(Method):
    """A new parameter is a transposed view of the one that it replaces."""

    makes = ("turned", "weight_scale")

    def process_weights_after_loading(self, layer: Any) -> None:
        layer.turned = torch.nn.Parameter(layer.weight.data.t(), requires_grad=False)
        del layer.weight


class Replaces(Method):
    """The parameters stay and get other data: one of another type, and one a part of what it had."""

    def process_weights_after_loading(self, layer: Any) -> None:
        layer.weight_scale.data = layer.weight_scale.data[: ROWS // 2]
        layer.weight.data = layer.weight.data.to(torch.int16).contiguous()


class Empties(Method):
    """A parameter that is needed no more keeps its name and has no elements."""

    makes = ("weight_scale",)

    def process_weights_after_loading(self, layer: Any) -> None:
        layer.weight.data = torch.empty(0, dtype=torch.int8)


class Shares(Method):
    """Two new tensors over one new storage, one of them shifted."""

    makes = ("upper", "lower", "weight_scale")

    def process_weights_after_loading(self, layer: Any) -> None:
        both = layer.weight.data.float()
        layer.upper, layer.lower = both[: ROWS // 2], torch.nn.Parameter(both[ROWS // 2 :], requires_grad=False)
        del layer.weight


NO_WIDER = [Method, Repacks, Rebuilds, Passes, Strays, Scratch, Turns, Empties]
WIDER = [Widens, Folds, Replaces, Shares]
"""Methods whose tensors are larger than those that they replace."""
METHODS = [*NO_WIDER, *WIDER]


class Layer(torch.nn.Module):
    def __init__(self, method: Any, drawn: torch.Generator) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.empty(ROWS, COLUMNS, dtype=torch.int8), requires_grad=False)
        self.weight_scale = torch.nn.Parameter(torch.empty(ROWS, 1), requires_grad=False)
        self.weight.data.copy_(torch.randint(-127, 128, (ROWS, COLUMNS), generator=drawn))
        self.weight_scale.data.copy_(torch.rand(ROWS, 1, generator=drawn))
        self.quant_method = method


class Model(torch.nn.Module):
    """Layers of one method between an embedding and a head that are tied, as in a language model."""

    def __init__(self, method: Callable[[], Any], seed: int = 0) -> None:
        super().__init__()
        drawn = torch.Generator().manual_seed(seed)
        self.embed = torch.nn.Embedding(10, 16)
        self.embed.weight.data.copy_(torch.rand(10, 16, generator=drawn))
        self.layers = torch.nn.ModuleList(Layer(method(), drawn) for _ in range(LAYERS))
        self.norm = torch.nn.Parameter(torch.rand(8, generator=drawn))
        self.head = torch.nn.Linear(16, 10, bias=False)
        self.head.weight = self.embed.weight
        self.head.quant_method = Method()


def empty_range(needed: list[int] | None = None) -> MappedWeights:
    return MappedWeights(torch.zeros(RANGE_BYTES, dtype=torch.uint8), (needed if needed is not None else []).append)


def processed(method: Callable[[], Any], range_: MappedWeights, seed: int = 0) -> Model:
    """A model as the loaders leave it before they bind it."""
    with weights_range.born_in(range_, copy=True):
        model = Model(method, seed)
        post_processing.process(model, range_)
    return model


def bound(method: Callable[[], Any], range_: MappedWeights, seed: int = 0) -> Model:
    """A model as the loaders leave it."""
    model = processed(method, range_, seed)
    weights_range.bind(model, range_, copy=True)
    weights_range.close_gaps(model, range_)
    return model


def expected(method: Any, seed: int = 0) -> dict[str, torch.Tensor]:
    """The tensors that the method makes without a range."""
    model = Model(method, seed)
    for layer in model.layers:
        layer.quant_method.process_weights_after_loading(layer)  # type: ignore[operator,union-attr]
    return tensors(model, method)


def tensors(model: Model, method: Any) -> dict[str, torch.Tensor]:
    """Tensors of a model that belong to its weights, by name."""
    found = {"embed.weight": model.embed.weight, "head.weight": model.head.weight, "norm": model.norm}
    for number, layer in enumerate(model.layers):
        for path in method.makes:
            *attributes, last = path.split(".")
            value = attrgetter(".".join(attributes))(layer) if attributes else layer
            found[f"layers.{number}.{path}"] = value[int(last)] if last.isdigit() else getattr(value, last)
    return found


def check_values(model: Model, method: Any, range_: MappedWeights) -> None:
    """All tensors lie in the range and are what the method makes of them, strides included."""
    for name, tensor in expected(method).items():
        found = tensors(model, method)[name]
        assert range_.span(found) is not None, name
        assert found.dtype == tensor.dtype and found.stride() == tensor.stride() and torch.equal(found, tensor), name


@pytest.mark.parametrize("method", METHODS)
def test_tensors_that_a_quantisation_method_makes_lie_in_the_range_without_gaps(
    method: Any,
) -> None:
    range_ = empty_range()
    model = processed(method, range_)
    made = {name: tensor for name, tensor in tensors(model, method).items() if name.startswith("layers")}
    assert all(range_.span(tensor) is not None for tensor in made.values())
    assert all(torch.equal(tensor, made[name]) for name, tensor in expected(method).items() if name in made)

    weights_range.bind(model, range_, copy=True)
    weights_range.close_gaps(model, range_)
    check_values(model, method, range_)
    places = weights_range.lay_out(model, range_).places
    assert {place.name for place in places} == tensors(model, method).keys()
    spans = sorted({span for tensor in tensors(model, method).values() if (span := range_.span(tensor)) is not None})
    end = 0
    for first, last in spans:
        assert first < end + ALIGN_BYTES, f"{first - end} bytes before {first} hold nothing"
        end = max(end, last)
    assert end <= range_.used < end + ALIGN_BYTES


@pytest.mark.parametrize("method", METHODS)
def test_range_grows_by_a_layer_beyond_the_model_at_most_or_by_all_where_they_widen(method: Any) -> None:
    read, needed = list[int](), list[int]()
    bound(Method, empty_range(read))
    range_ = empty_range(needed)
    bound(method, range_)
    if method in NO_WIDER:
        between = LAYER_BYTES if method is Passes else 0
        assert max(needed) <= max(max(read), range_.used) + LAYER_BYTES + between + ALIGN_BYTES
    else:
        assert max(needed) <= max(read) + range_.used


def test_first_layer_takes_a_place_behind_the_model_and_leaves_its_own_to_the_next() -> None:
    before, range_, other = empty_range(), empty_range(), empty_range()
    processed(Method, before)
    processed(Rebuilds, range_)
    assert range_.used == before.used + ROWS * COLUMNS
    processed(Repacks, other)
    assert other.used == before.used, "what is made outside of the range may have its own place"


def test_range_ends_behind_its_last_tensor_also_if_none_has_to_move() -> None:
    class Last(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = Layer(Method(), torch.Generator())
            self.last = Layer(Empties(), torch.Generator())

    range_ = empty_range()
    with weights_range.born_in(range_, copy=True):
        model = Last()
        model.last.weight_scale = None  # type: ignore[assignment]
        post_processing.process(model, range_)
    assert range_.used == 2 * LAYER_BYTES
    assert weights_range.close_gaps(model, range_) and range_.used == LAYER_BYTES
    assert not weights_range.close_gaps(model, range_) and range_.used == LAYER_BYTES


@pytest.mark.parametrize("method", METHODS)
def test_quantised_range_of_another_process_has_the_same_manifest_and_takes_the_image(method: Any) -> None:
    first, second = empty_range(), empty_range()
    model, other = bound(method, first), bound(method, second, seed=1)
    manifests = [
        weights_range.manifest(weights_range.lay_out(each, range_), 1 << 20, {}).SerializeToString(deterministic=True)
        for each, range_ in ((model, first), (other, second))
    ]
    assert manifests[0] == manifests[1]
    second.memory.copy_(first.memory)
    check_values(other, method, second)


class Router(torch.nn.Module):
    """Folds factors of its input into a norm without factors of its own, as Gemma 4's router does."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.scale = torch.nn.Parameter(torch.rand(8, generator=torch.Generator().manual_seed(seed)))
        self.norm = torch.nn.Module()
        self.norm.register_buffer("weight", torch.ones(8), persistent=False)
        self.norm.with_scale = False  # type: ignore[assignment]

    def fuse_scale(self) -> None:
        self.norm.weight.copy_(self.scale.detach() * 0.5)  # type: ignore[operator]


def test_factors_that_a_router_folds_into_its_norm_are_used_and_come_with_the_image() -> None:
    ranges, routers = (empty_range(), empty_range()), []
    for seed, range_ in enumerate(ranges):
        with weights_range.born_in(range_, copy=True):
            model = torch.nn.ModuleDict({"router": Router(seed)})
            post_processing.process(model, range_)
        weights_range.bind(model, range_, copy=True)
        assert [place.name for place in weights_range.lay_out(model, range_).places] == [
            "router.scale",
            "router.norm.weight",
        ]
        routers.append(model["router"])
    assert all(router.norm.with_scale for router in routers)
    wanted = routers[0].scale * 0.5
    assert torch.equal(routers[0].norm.weight, wanted) and not torch.equal(routers[1].norm.weight, wanted)
    ranges[1].memory.copy_(ranges[0].memory)
    assert torch.equal(routers[1].norm.weight, wanted), "from the image alone"


def test_scalar_outside_of_tensors_stays_and_goes_into_the_manifest() -> None:
    range_ = empty_range()
    model = bound(Folds, range_)
    scales = {f"layers.{number}.k_scale_float": layer.k_scale_float for number, layer in enumerate(model.layers)}
    assert len(set(scales.values())) == LAYERS and all(type(scale) is float for scale in scales.values())
    found = weights_range.python_scalars(model)
    assert {name: float(text) for name, text in found.items()} == scales


def test_scratch_memory_stays_private() -> None:
    range_ = empty_range()
    model = bound(Scratch, range_)
    for layer in model.layers:
        assert range_.span(layer.workspace) is None  # type: ignore[arg-type]
        assert range_.span(layer.quant_method.kernel.marlin_workspace) is None  # type: ignore[union-attr]


def test_tensor_that_a_layer_kept_before_stays_where_it_was() -> None:
    """It is none of what is made of the weights: a table that the method was given, for one."""

    class Given(Repacks):
        def __init__(self) -> None:
            self.table = torch.arange(7)

    range_ = empty_range()
    model = bound(Given, range_)
    assert all(range_.span(layer.quant_method.table) is None for layer in model.layers)  # type: ignore[union-attr]
    check_values(model, Given, range_)


def test_tied_parameters_stay_tied_and_in_place_when_one_of_two_layers_replaces_its_own() -> None:
    class Doubles(Method):
        def process_weights_after_loading(self, layer: Any) -> None:
            doubled = torch.nn.Parameter(layer.weight.data * 2, requires_grad=False)
            del layer.weight
            layer.doubled = doubled

    range_ = empty_range()
    with weights_range.born_in(range_, copy=True):
        model = Model(Repacks)
        model.tail = torch.nn.Linear(16, 10, bias=False)
        model.tail.weight = model.embed.weight
        model.tail.quant_method = Doubles()
        model.last = torch.nn.Linear(16, 10, bias=False)
        model.last.quant_method = Doubles()
        before = model.last.weight.data.clone()
        post_processing.process(model, range_)
    weights_range.bind(model, range_, copy=True)
    assert weights_range.close_gaps(model, range_)
    check_values(model, Repacks, range_)
    assert model.head.weight is model.embed.weight
    assert torch.equal(model.tail.doubled, model.embed.weight * 2) and torch.equal(model.last.doubled, before * 2)


@pytest.mark.parametrize("method", [Repacks, Rebuilds], ids=["its place is taken already", "its place would be taken"])
def test_a_tensor_over_the_range_that_cannot_be_found_is_refused_by_its_shape_and_its_holder(method: Any) -> None:
    class Hides(method):  # type: ignore[misc]
        def process_weights_after_loading(self, layer: Any) -> None:
            hidden = layer.weight.data.t()
            layer.run = lambda x: x @ hidden
            super().process_weights_after_loading(layer)

    range_ = empty_range()
    model = processed(Hides, range_)
    weights_range.bind(model, range_, copy=True)
    with pytest.raises(BrokenModel) as broken:
        weights_range.close_gaps(model, range_)
    assert "a tensor [96, 64] of torch.int8 over the weights where it cannot be found (held by cell)" in str(
        broken.value
    )


def test_a_tensor_that_a_view_was_made_of_is_refused_where_an_object_has_it_as_well() -> None:
    """Where none has it (`Shares`), torch alone keeps it, and nothing reads it."""

    class Hides(Method):
        def process_weights_after_loading(self, layer: Any) -> None:
            both = layer.weight.data.float()
            layer.upper = both[: ROWS // 2]
            layer.run = lambda x: x @ both
            del layer.weight

    range_ = empty_range()
    model = processed(Hides, range_)
    weights_range.bind(model, range_, copy=True)
    with pytest.raises(BrokenModel, match=r"a tensor \[64, 96\] of torch.float32 .* \(held by cell\)"):
        weights_range.close_gaps(model, range_)


def test_a_tensor_of_a_class_that_takes_no_other_memory_is_refused_by_its_name() -> None:
    class Own(torch.Tensor):
        def __setattr__(self, name: str, value: Any) -> None:
            if name == "data":
                raise RuntimeError("a tensor of this class keeps its memory")
            super().__setattr__(name, value)

    class Keeps(Method):
        def process_weights_after_loading(self, layer: Any) -> None:
            layer.own = layer.weight.data.float().as_subclass(Own)

    with pytest.raises(BrokenModel, match=r"^layers\.0\.own cannot lie among the weights: a tensor of this class"):
        processed(Keeps, empty_range())


class MadeOfWeights(Model):
    """A model that makes a tensor of two of its parameters as they are read, and keeps a view of a third."""

    def post_load_weights(self) -> None:
        first, second = self.layers[0], self.layers[1]
        first.made = first.weight.data.float().t()  # type: ignore[operator,union-attr]
        self.seen = second.weight.data[: ROWS // 2]  # type: ignore[index,union-attr]


@pytest.mark.parametrize("method", [Method, Repacks, Passes], ids=lambda each: each.__name__)
def test_what_a_model_makes_of_its_weights_lies_with_them_and_comes_from_an_image(method: Any) -> None:
    def built(seed: int, read: bool) -> tuple[MadeOfWeights, MappedWeights]:
        range_ = empty_range()
        with weights_range.born_in(range_, copy=read):
            model = MadeOfWeights(method, seed)
            post_processing.make(model)
            post_processing.process(model, range_)
        weights_range.bind(model, range_, copy=read)
        weights_range.close_gaps(model, range_)
        return model, range_

    model, range_ = built(0, read=True)
    plain = Model(Method, 0)
    other, image = built(1, read=False)
    layouts = [weights_range.lay_out(*each) for each in ((model, range_), (other, image))]
    assert layouts[0] == layouts[1]
    assert {"layers.0.made", "seen"} <= {place.name for place in layouts[0].places}
    image.memory.copy_(range_.memory)
    for each in (model, other):
        made, seen = each.layers[0].made, each.seen
        assert torch.equal(made, plain.layers[0].weight.float().t()), "of what was read"  # type: ignore[operator]
        assert torch.equal(seen, plain.layers[1].weight[: ROWS // 2])  # type: ignore[index]


def test_model_that_makes_nothing_of_its_weights_is_left_as_it_is() -> None:
    model = Model(Method)
    before = set(vars(model.layers[0]))
    post_processing.make(model)
    assert set(vars(model.layers[0])) == before
