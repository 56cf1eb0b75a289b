"""Values of parameters that a checkpoint does not set are found, whatever their type."""

from __future__ import annotations

import pytest
import torch

from gpu_scheduler.engines.sglang.weights import unset

TYPES = [torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn, torch.int8, torch.uint8, torch.int32]
ROWS, COLUMNS = 12, 40
"""Rows of one byte a value are no multiple of the mark's 16 bytes."""


class Layer(torch.nn.Module):
    def __init__(self, dtype: torch.dtype, *names: str) -> None:
        super().__init__()
        for name in names or ("weight",):
            weight = torch.zeros(ROWS, COLUMNS, dtype=torch.uint8).to(dtype)
            self.register_parameter(name, torch.nn.Parameter(weight, requires_grad=False))


def drawn(dtype: torch.dtype) -> torch.Tensor:
    """Values as those of a checkpoint; those of FP8 are all bytes that are no NaN."""
    generator = torch.Generator().manual_seed(0)
    if dtype.is_floating_point and dtype.itemsize > 1:
        return torch.randn(ROWS, COLUMNS, generator=generator).to(dtype)
    values = torch.randint(0, 127, (ROWS, COLUMNS * dtype.itemsize), dtype=torch.uint8, generator=generator)
    return values.view(dtype)


@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_a_parameter_is_marked_until_all_its_values_are_set(dtype: torch.dtype) -> None:
    layer = Layer(dtype)
    assert unset.mark(layer).keys() == {"weight"}
    assert unset.is_marked(layer.weight), "not set at all"  # type: ignore[arg-type]
    for missing in (0, 5, ROWS - 1):
        unset.mark(layer)
        present = [row for row in range(ROWS) if row != missing]
        layer.weight.data[present] = drawn(dtype)[present]
        assert unset.is_marked(layer.weight), f"row {missing} is missing"  # type: ignore[arg-type]
    layer.weight.data[missing] = drawn(dtype)[missing]
    assert not unset.is_marked(layer.weight), "wholly set"  # type: ignore[arg-type]


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("value", [0, 1])
def test_parameter_filled_with_one_value_counts_as_set(dtype: torch.dtype, value: int) -> None:
    layer = Layer(dtype)
    unset.mark(layer)
    layer.weight.data.fill_(value)
    assert not unset.is_marked(layer.weight)  # type: ignore[arg-type]


def test_mark_of_an_unset_fp8_parameter_is_no_nan() -> None:
    """Sums over it would say nothing of where it came from."""
    layer = Layer(torch.float8_e4m3fn)
    unset.mark(layer)
    assert not layer.weight.data.float().isnan().any()


def test_marked_parameters_have_the_models_names_and_exclude_optional_ones() -> None:
    optional = ("k_scale", "input_scale", "g_idx", "w2_g_idx_sort_indices")
    layer = Layer(torch.float32, "weight", "scales", "weight_scale_inv", *optional)
    layer.register_parameter("skipped", torch.nn.Parameter(torch.zeros(3)))
    layer.skipped._skip_weight_check = True  # type: ignore[assignment]
    model = torch.nn.Module()
    model.first = layer
    model.register_parameter("own", torch.nn.Parameter(torch.zeros(4)))
    assert unset.mark(model).keys() == {"own", "first.weight", "first.scales", "first.weight_scale_inv"}
    assert not any(getattr(layer, name).any() for name in optional)


@pytest.mark.parametrize("name", ["hidden_pad", "intermediate_pad"])
def test_layers_that_sglang_widens_are_not_marked(name: str) -> None:
    """A checkpoint has nothing for what they were widened by."""

    class Method:
        hidden_pad = intermediate_pad = 0

    layer, method = Layer(torch.uint8), Method()
    layer.quant_method = method
    assert unset.mark(layer).keys() == {"weight"}
    setattr(method, name, 32)
    assert unset.mark(layer).keys() == set()


@pytest.mark.parametrize(
    "weight",
    [
        pytest.param(torch.zeros(3, 5, dtype=torch.int8), id="no whole number of marks"),
        pytest.param(torch.zeros(16, 32, dtype=torch.int8).t(), id="transposed"),
        pytest.param(torch.zeros(65, dtype=torch.int8)[1:], id="at an odd address"),
        pytest.param(torch.zeros(0, 16, dtype=torch.int32), id="empty"),
    ],
)
def test_a_parameter_that_takes_no_mark_is_left_alone(weight: torch.Tensor) -> None:
    layer = torch.nn.Module()
    layer.register_parameter("weight", torch.nn.Parameter(weight, requires_grad=False))
    assert unset.mark(layer) == {}
    assert not unset.is_marked(layer.weight) and not layer.weight.any()  # type: ignore[arg-type,operator]


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("shared", [True, False])
def test_only_layers_that_use_the_kv_of_others_may_lack_what_makes_keys_and_values(
    dtype: torch.dtype, shared: bool
) -> None:
    attention = torch.nn.Module()
    attention.is_kv_shared_layer, attention.q_size = shared, ROWS // 2  # type: ignore[assignment]
    attention.qkv_proj, attention.k_norm = Layer(dtype), Layer(torch.bfloat16)
    unset.mark(attention)
    queries = drawn(dtype)[: ROWS // 2]
    attention.qkv_proj.weight.data[: ROWS // 2] = queries
    unset.fill_unused(attention)
    assert unset.is_marked(attention.k_norm.weight) != shared  # type: ignore[arg-type]
    assert unset.is_marked(attention.qkv_proj.weight) != shared  # type: ignore[arg-type]
    assert torch.equal(attention.qkv_proj.weight.data[: ROWS // 2].view(torch.uint8), queries.view(torch.uint8))
