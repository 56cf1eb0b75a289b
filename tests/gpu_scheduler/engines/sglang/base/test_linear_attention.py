"""The stand-ins for SGLang's operators of linear attention, beside a recurrence written token by token in float64."""

from __future__ import annotations

import importlib.util
from math import exp, log1p
from pathlib import Path
from types import ModuleType

import pytest
import torch

from gpu_scheduler.engines.sglang.base import environment

SLOTS, KEY_HEADS, VALUE_HEADS, KEY, VALUE = 7, 2, 6, 5, 3
LENGTHS = [4, 1, 9]
PLACES = torch.tensor([5, 2, 6])


@pytest.fixture(scope="module")
def operators() -> ModuleType:
    return stand_ins("linear_attention")


def stand_ins(name: str) -> ModuleType:
    """A file of the stand-in for sgl_kernel, which is on no import path outside engines."""
    path = Path(environment.__file__).parent / "cpu_stubs" / "sgl_kernel" / f"{name}.py"
    spec = importlib.util.spec_from_file_location(f"stand_ins_of_{name}", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def drawn(*sizes: int, seed: int) -> torch.Tensor:
    return torch.randn(sizes, generator=torch.Generator().manual_seed(seed))


def strided(states: torch.Tensor) -> torch.Tensor:
    """States with a gap behind each, as states lie in extents."""
    flat = states.flatten(1)
    padded = torch.full((len(states), flat.shape[1] + 11), float("nan"))
    padded[:, : flat.shape[1]] = flat
    return padded[:, : flat.shape[1]].as_strided(states.shape, (padded.stride(0), *states.stride()[1:]))


def bounds() -> torch.Tensor:
    return torch.tensor([0, *torch.tensor(LENGTHS).cumsum(0).tolist()])


def recurrence(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor, beta: torch.Tensor, state: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """(outputs, last state) of one sequence and one head: S = a S (I - b k k') + b v k'; o = S q / sqrt(size)."""
    out, state, one = [], state.double(), torch.eye(KEY, dtype=torch.float64)
    for token in range(len(q)):
        key, query = k[token].double(), q[token].double()
        key, query = key / (key @ key + 1e-6).sqrt(), query / (query @ query + 1e-6).sqrt()
        decay, strength = exp(float(g[token])), float(beta[token])
        kept = one - strength * torch.outer(key, key)
        state = decay * state @ kept + strength * torch.outer(v[token].double(), key)
        out.append(state @ query / KEY**0.5)
    return torch.stack(out), state


def test_gated_delta_rule_keeps_what_is_no_number_to_the_sequence_that_has_it(operators: ModuleType) -> None:
    """Sequences of a step differ in length. Sequences that are over stay beside the others, and take nothing of
    them."""
    tokens, at = sum(LENGTHS), bounds()
    q, k = drawn(1, tokens, KEY_HEADS, KEY, seed=1), drawn(1, tokens, KEY_HEADS, KEY, seed=2)
    v = drawn(1, tokens, VALUE_HEADS, VALUE, seed=3)
    gates = {"g": -drawn(1, tokens, VALUE_HEADS, seed=4).abs(), "beta": drawn(1, tokens, VALUE_HEADS, seed=5).sigmoid()}
    for number, place in enumerate(PLACES.tolist()):
        states, values = drawn(SLOTS, VALUE_HEADS, VALUE, KEY, seed=6), v.clone()
        values[:, at[number] : at[number + 1]] = float("nan")
        out, _, _ = operators.chunk_gated_delta_rule_cpu(
            q=q,
            k=k,
            v=values,
            **gates,
            initial_state=states,
            initial_state_indices=PLACES,
            cu_seqlens=at,
            use_qk_l2norm_in_kernel=True,
        )
        found = [slot for slot in range(SLOTS) if states[slot].isnan().any()]
        assert found == [place], number
        assert torch.equal(out.isnan(), values.isnan()), number


def test_gated_delta_rule_equals_the_recurrence_and_writes_its_slots_only(operators: ModuleType) -> None:
    tokens, at = sum(LENGTHS), bounds()
    q, k = drawn(1, tokens, KEY_HEADS, KEY, seed=1), drawn(1, tokens, KEY_HEADS, KEY, seed=2)
    v = drawn(1, tokens, VALUE_HEADS, VALUE, seed=3)
    g, beta = -drawn(1, tokens, VALUE_HEADS, seed=4).abs(), drawn(1, tokens, VALUE_HEADS, seed=5).sigmoid()
    before = drawn(SLOTS, VALUE_HEADS, VALUE, KEY, seed=6)
    states = strided(before)
    out, _, _ = operators.chunk_gated_delta_rule_cpu(
        q=q,
        k=k,
        v=v,
        g=g,
        beta=beta,
        initial_state=states,
        initial_state_indices=PLACES,
        cu_seqlens=at,
        use_qk_l2norm_in_kernel=True,
    )
    for slot, start, end in zip(PLACES.tolist(), at.tolist(), at.tolist()[1:], strict=False):
        for head in range(VALUE_HEADS):
            key_head = head // (VALUE_HEADS // KEY_HEADS)
            part = slice(start, end)
            expected, last = recurrence(
                q[0, part, key_head], k[0, part, key_head], v[0, part, head], g[0, part, head], beta[0, part, head],
                before[slot, head],
            )  # fmt: skip
            torch.testing.assert_close(out[0, part, head].double(), expected, rtol=1e-4, atol=1e-5)
            torch.testing.assert_close(states[slot, head].double(), last, rtol=1e-4, atol=1e-5)
    others = [slot for slot in range(SLOTS) if slot not in PLACES.tolist()]
    assert torch.equal(states[others], before[others])


def test_decode_step_of_the_delta_rule_equals_a_prefill_of_one_token(operators: ModuleType) -> None:
    batch = len(PLACES)
    q, k = drawn(1, batch, KEY_HEADS, KEY, seed=1), drawn(1, batch, KEY_HEADS, KEY, seed=2)
    v, before = drawn(1, batch, VALUE_HEADS, VALUE, seed=3), drawn(SLOTS, VALUE_HEADS, VALUE, KEY, seed=6)
    a, b = drawn(batch, VALUE_HEADS, seed=7), drawn(batch, VALUE_HEADS, seed=8)
    log, bias = drawn(VALUE_HEADS, seed=9), drawn(VALUE_HEADS, seed=10)
    common = {"q": q, "k": k, "v": v, "cu_seqlens": torch.arange(batch + 1), "use_qk_l2norm_in_kernel": True}
    decoded, prefilled = before.clone(), before.clone()
    out = operators.fused_sigmoid_gating_delta_rule_update_cpu(
        A_log=log, dt_bias=bias, a=a, b=b, initial_state_source=decoded, initial_state_indices=PLACES, **common
    )
    g, beta = operators.fused_gdn_gating_cpu(log, a, b, bias)
    expected, _, _ = operators.chunk_gated_delta_rule_cpu(
        g=g, beta=beta, initial_state=prefilled, initial_state_indices=PLACES, **common
    )
    assert torch.equal(out, expected) and torch.equal(decoded, prefilled)


def test_gates_equal_their_formulas(operators: ModuleType) -> None:
    a, b, log, bias = drawn(3, 2, seed=1), drawn(3, 2, seed=2), drawn(2, seed=3), drawn(2, seed=4)
    g, beta = operators.fused_gdn_gating_cpu(log, a, b, bias)
    for token in range(3):
        for head in range(2):
            softplus = log1p(exp(float(a[token, head] + bias[head])))
            assert float(g[0, token, head]) == pytest.approx(-exp(float(log[head])) * softplus, rel=1e-4)
            assert float(beta[0, token, head]) == pytest.approx(1 / (1 + exp(-float(b[token, head]))), rel=1e-4)


@pytest.mark.parametrize("biased", [True, False])
def test_convolution_in_parts_equals_one_over_the_whole_sequence(operators: ModuleType, biased: bool) -> None:
    channels, width = 6, 4
    weight, bias = drawn(channels, width, seed=1), drawn(channels, seed=2) if biased else None
    x = drawn(channels, 12, seed=3)
    padded = torch.cat((torch.zeros(channels, width - 1), x), dim=1)
    expected = torch.stack([(padded[:, t : t + width] * weight).sum(1) for t in range(12)], dim=1)
    expected = torch.nn.functional.silu(expected + (0 if bias is None else bias[:, None]))
    states = strided(drawn(SLOTS, channels, width - 1, seed=4))
    before, slot, said = states.clone(), torch.tensor([3]), []
    for start, end in ((0, 5), (5, 7), (7, 8)):  # the second is shorter than the window
        said.append(
            operators.causal_conv1d_fn_cpu(
                x[:, start:end],
                weight,
                bias,
                activation="silu",
                conv_states=states,
                has_initial_state=torch.tensor([start > 0]),
                cache_indices=slot,
                query_start_loc=torch.tensor([0, end - start]),
                seq_lens_cpu=[end - start],
            )
        )
    for token in range(8, 12):
        step = operators.causal_conv1d_update_cpu(
            x[:, token][None], states, weight, bias, "silu", conv_state_indices=slot
        )
        said.append(step.T)
    torch.testing.assert_close(torch.cat(said, dim=1), expected)
    others = [number for number in range(SLOTS) if number != 3]
    assert torch.equal(states[others], before[others])


@pytest.mark.parametrize("activation", ["silu", "sigmoid"])
def test_gated_norm_equals_its_formula(operators: ModuleType, activation: str) -> None:
    x, gate, weight = drawn(4, 8, seed=1), drawn(4, 8, seed=2), drawn(8, seed=3)
    opened = gate.sigmoid() * (gate if activation == "silu" else 1)
    expected = x / (x.square().mean(1, keepdim=True) + 1e-5).sqrt() * weight * opened
    torch.testing.assert_close(operators.fused_rmsnorm_gated_cpu(x, weight, gate, 1e-5, activation), expected)


def test_queries_keys_and_gates_are_parted_and_normed_by_head(operators: ModuleType) -> None:
    q_gate, k = drawn(3, 2 * 2 * 4, seed=1), drawn(3, 4, seed=2)
    q_weight, k_weight = drawn(4, seed=3), drawn(4, seed=4)
    q, key, gate = operators.fused_qk_gemma_rmsnorm_with_gate_cpu(q_gate, k, q_weight, k_weight, 1e-6, 4, 2)
    first = q_gate[0, 8:12]  # of the second head, behind the query and the gate of the first
    expected = first / (first.square().mean() + 1e-6).sqrt() * (1 + q_weight)
    torch.testing.assert_close(q.view(3, 2, 4)[0, 1], expected)
    torch.testing.assert_close(key[1], k[1] / (k[1].square().mean() + 1e-6).sqrt() * (1 + k_weight))
    assert torch.equal(gate.view(3, 2, 4)[0, 1], q_gate[0, 12:16])


def test_joined_projections_are_parted_in_their_order(operators: ModuleType) -> None:
    qkvz, ba = drawn(3, 2 * 2 * 4 + 2 * 6 * 5, seed=1), drawn(3, 12, seed=2)
    qkv, z, b, a = operators.fused_qkvzba_split_reshape_cat_contiguous_cpu(qkvz, ba, 2, 6, 4, 5)
    assert torch.equal(torch.cat((qkv, z.flatten(1)), dim=1), qkvz) and z.shape == (3, 6, 5)
    assert torch.equal(torch.cat((b, a), dim=1), ba)


def test_gate_is_multiplied_in_place(operators: ModuleType) -> None:
    x, gate = drawn(3, 4, seed=1), drawn(3, 4, seed=2)
    expected = x * gate.sigmoid()
    operators.fused_sigmoid_mul_cpu(x, gate)
    torch.testing.assert_close(x, expected)
