import json
from dataclasses import replace
from pathlib import Path
from statistics import median

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kv_kinds.layout import state, window
from sim.engines.cost import H100, H200, Cost, Shape, on_host
from sim.inputs.catalogue import SHAPES

ALONE_ON_H100S = Path(__file__).parents[3] / "benchmarks" / "results" / "compare_h100" / "slos.json"
EIGHT = Cost(SHAPES["8b"])
MB, GB = 10**6, 10**9


@given(st.integers(0, 3000), st.integers(1, 256), st.integers(0, 400_000), st.floats(0.0, 0.999))
def test_steps_in_a_time_of_a_device_bound_model_are_those_whose_cost_fits_into_it(steps, batch, context, part):
    low, high = (EIGHT.decode(n, batch, context) for n in (steps, steps + 1))
    assert EIGHT.steps_in(low + part * (high - low), batch, context) == steps


def test_cost_of_a_run_of_decode_steps_is_the_sum_of_its_steps():
    one_by_one = sum(EIGHT.decode(1, 7, 900 + 7 * step) for step in range(50))
    assert EIGHT.decode(50, 7, 900) == pytest.approx(one_by_one)


def test_decodes_of_small_models_are_bound_by_their_hosts_and_leave_the_devices_idle():
    one = Cost(SHAPES["1b"])
    host_s = H200.decode_host_s + 8 * H200.decode_host_request_s
    devices_s = Cost(SHAPES["1b"], replace(H200, decode_host_s=0.0, decode_host_request_s=0.0)).decode(1, 8, 8000)
    assert one.decode(10, 8, 8000) == pytest.approx(10 * host_s)
    assert one.decode_share(8, 8000) == pytest.approx(devices_s / host_s) and devices_s < host_s
    assert one.decode(1, 8, 800_000) > 1.5 * host_s and one.decode_share(8, 800_000) == 1.0  # so much KV
    assert EIGHT.decode_share(8, 8000) == 1.0


def test_decodes_without_graphs_take_their_hosts_time_for_each_layer():
    eager = replace(H200, decode_host_layer_s=0.001)
    host_s = H200.decode_host_s + 16 * 0.001 + 8 * H200.decode_host_request_s
    assert Cost(SHAPES["1b"], eager).decode(10, 8, 8000) == pytest.approx(10 * host_s)


@given(st.integers(0, 3000), st.integers(1, 256), st.integers(0, 400_000), st.floats(0.0, 0.999))
def test_steps_in_a_time_of_a_host_bound_model_are_those_whose_cost_fits_into_it(steps, batch, context, part):
    one = Cost(SHAPES["1b"])
    low, high = (one.decode(n, batch, context) for n in (steps, steps + 1))
    assert one.steps_in(low + part * (high - low), batch, context) == steps


def test_cost_of_a_prompt_in_two_parts_is_that_of_the_whole():
    assert EIGHT.prefill_part(300, 0) + EIGHT.prefill_part(700, 300) == pytest.approx(EIGHT.prefill_part(1000, 0))


def test_a_prefill_step_takes_at_least_what_its_host_takes_and_a_short_one_less():
    small, large = EIGHT.prefill_part(16, 0), EIGHT.prefill_part(4096, 0)
    graph, eager = H200.prefill_graph_layer_s, H200.prefill_layer_s
    assert EIGHT.prefill(small, 16) == H200.prefill_host_s + 32 * graph > small
    assert EIGHT.prefill(small, 513) == H200.prefill_host_s + 32 * eager > 32 * graph
    assert EIGHT.prefill(large, 4096) == pytest.approx(large)


def test_host_time_of_a_prefill_follows_the_layers_and_has_no_graphs_on_several_devices():
    hardware = replace(H200, prefill_graph_tokens=512)
    one, shape = Cost(SHAPES["1b"], hardware), SHAPES["70b"]
    for tokens, each in ((16, H200.prefill_graph_layer_s), (2048, H200.prefill_layer_s)):
        assert EIGHT.prefill(0.0, tokens) - one.prefill(0.0, tokens) == pytest.approx(16 * each)
    two, four = (Cost(replace(shape, devices=devices)) for devices in (2, 4))
    assert two.prefill(0.0, 16) == two.prefill(0.0, 2048) == four.prefill(0.0, 16) > EIGHT.prefill(0.0, 2048)


def test_a_decode_step_reads_the_windows_of_each_request_and_reads_and_writes_its_state():
    plain = Shape(GB, 1000)
    kinds = replace(plain, other_kinds=(window(2000, 500, 100), state(3 * MB)))
    one, two = (Cost(kinds).decode_devices(1, batch, 1000) for batch in (1, 2))
    own = (500 * 2000 + 2 * 3 * MB) / H200.kv_bytes_per_s
    assert one - Cost(plain).decode_devices(1, 1, 1000) == pytest.approx(own)
    assert two - Cost(plain).decode_devices(1, 2, 1000) == pytest.approx(2 * own)


def test_a_model_on_two_devices_has_half_of_its_bytes_and_compute_on_each():
    whole = SHAPES["8b"]
    two = Cost(Shape(whole.weights_bytes, whole.kv_bytes_per_token, 2))
    half = max((EIGHT.wake_s - H200.wake_base_s) / 2, whole.weights_bytes / H200.host_bytes_per_s)
    assert two.wake_s - H200.wake_base_s == pytest.approx(half)
    assert two.prefill_part(1000, 0) == pytest.approx(EIGHT.prefill_part(1000, 0) / 2)
    assert two.decode_step_s > EIGHT.decode_step_s / 2  # they exchange


@pytest.mark.parametrize("shape", ["8b", "3b", "1b"])
def test_an_h100_is_busy_with_a_decode_step_of_a_model_alone_for_as_long_as_measured(shape):
    found = json.loads(ALONE_ON_H100S.read_text())["samples"]
    alone = [rows for part in found for by_model in part.values() for name, rows in by_model.items() if shape in name]
    steps = [median(row[5] for row in rows if row[5]) for rows in alone if median(row[3] for row in rows) >= 50]
    assert len(steps) >= 3
    cost = Cost(SHAPES[shape], H100)
    devices_s = cost.decode(1, 1, 1000) * cost.decode_share(1, 1000)
    assert devices_s == pytest.approx(median(steps), rel=0.05)


def test_an_h100_has_less_memory_and_reads_it_slower():
    eight = Cost(SHAPES["8b"], H100)
    assert eight.decode(1, 64, 64_000) > 1.25 * EIGHT.decode(1, 64, 64_000)
    assert eight.prefill(eight.prefill_part(2048, 0), 2048) == EIGHT.prefill(EIGHT.prefill_part(2048, 0), 2048)
    assert H100.capacity_bytes < 0.6 * H200.capacity_bytes


def test_gaps_of_a_prefill_follow_its_layers_only_where_the_host_is_slower_than_the_devices():
    small, whole = EIGHT.prefill_part(16, 0), EIGHT.prefill_part(2048, 0)
    most = 32 * H200.prefill_gap_layer_s
    assert 0.9 * most < EIGHT.prefill_gaps(small, 16) < most
    assert EIGHT.prefill_gaps(whole, 2048) == 0.0


@given(st.integers(1, 256), st.integers(0, 400_000))
def test_decode_step_of_a_mixture_costs_between_its_active_and_all_of_its_weights(batch, context):
    mixture, shape = Cost(SHAPES["30b-a3b"]), SHAPES["30b-a3b"]
    least = Cost(replace(shape, weights_bytes=shape.active_bytes, active_bytes=0))
    most = Cost(replace(shape, active_bytes=0))
    step = mixture.decode_devices(1, batch, context)
    assert least.decode_devices(1, batch, context) <= step * (1 + 1e-9)
    assert step <= most.decode_devices(1, batch, context) * (1 + 1e-9)
    assert mixture.decode_devices(1, batch + 1, context) > step
    if batch == 1:
        assert step == pytest.approx(least.decode_devices(1, batch, context))
    assert mixture.prefill_part(512, 0) == pytest.approx(least.prefill_part(512, 0))


@given(st.integers(1, 256), st.integers(0, 400_000))
def test_decode_step_reads_no_embeddings_of_a_model_without_experts_whatever_the_batch(batch, context):
    rows = replace(SHAPES["8b"], active_bytes=9_000_000_000, expert_share=1.0)
    without = replace(rows, weights_bytes=rows.active_bytes)
    step = Cost(rows).decode_devices(1, batch, context)
    assert step == pytest.approx(Cost(without).decode_devices(1, batch, context))


@given(st.integers(0, 300), st.integers(1, 256), st.integers(0, 400_000), st.floats(0.0, 0.999))
def test_steps_in_a_time_of_a_mixture_are_those_whose_cost_fits_into_it(steps, batch, context, part):
    mixture = Cost(SHAPES["30b-a3b-fp8"])
    low, high = (mixture.decode(n, batch, context) for n in (steps, steps + 1))
    assert mixture.steps_in(low + part * (high - low), batch, context) == steps


def test_slower_host_takes_longer_and_its_devices_do_not():
    usual, slow = (Cost(SHAPES["1b"], on_host(H200, factor)) for factor in (1.0, 2.0))
    assert slow.prefill_host(100) == pytest.approx(2 * usual.prefill_host(100))
    assert slow.decode(1, 1, 1) == pytest.approx(2 * usual.decode(1, 1, 1))  # a 1B model waits for its host
    assert slow.decode_devices(1, 1, 1) == usual.decode_devices(1, 1, 1)
