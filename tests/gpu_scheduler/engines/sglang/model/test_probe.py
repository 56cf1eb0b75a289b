from __future__ import annotations

import pytest

from gpu_scheduler.engines.sglang.model.probe import Probe
from tests.gpu_scheduler.engines.sglang.scripted import Clock


def test_the_probe_runs_its_stages_one_after_the_other_and_measures_the_last() -> None:
    clock = Clock()
    probe = Probe(vocab_size=1000, context_tokens=2048, clock=clock)
    (first,) = probe.next_requests()
    assert probe.next_requests() == []
    probe.heard([1], [-0.5], ended=True)
    (second,) = probe.next_requests()
    assert second.request_id != first.request_id
    assert probe.has(second.request_id) and not probe.has(first.request_id)
    assert list(second.token_ids)[:8] != list(first.token_ids)[:8]
    clock.now += 0.5
    probe.heard([2], [-0.1], ended=False)
    for token in (3, 4):
        clock.now += 0.01
        probe.heard([token], [-0.2], ended=token == 4)
    assert probe.finished and probe.next_requests() == []
    assert probe.trace.token_ids == [1, 2, 3, 4]
    assert probe.trace.prefill_tokens_per_s == pytest.approx(len(second.token_ids) / 0.5)
    assert probe.trace.decode_step_ms == pytest.approx(10.0)


def test_a_decode_step_is_as_long_as_the_quicker_ones_of_the_probe() -> None:
    """Others may use the device meanwhile; and one that seems to take no time came behind one that was seen late."""
    clock = Clock()
    probe = Probe(vocab_size=1000, context_tokens=2048, clock=clock)
    probe.next_requests()
    probe.heard([1], [-0.5], ended=True)
    probe.next_requests()
    probe.heard([2], [-0.1], ended=False)
    for number, seconds in enumerate((0.030, 0.005, 0.029, 0.001, 0.031)):
        clock.now += seconds
        probe.heard([3], [-0.2], ended=number == 4)
    assert probe.trace.decode_step_ms == pytest.approx(5.0)


def test_the_probe_fits_a_small_context() -> None:
    probe = Probe(vocab_size=10, context_tokens=20)
    (request,) = probe.next_requests()
    assert len(request.token_ids) + request.sampling.max_new_tokens <= 20


def test_probe_that_cannot_run_states_its_reason() -> None:
    probe = Probe(vocab_size=10, context_tokens=200)
    probe.next_requests()
    probe.stop("no memory")
    assert probe.finished and probe.problem == "no memory" and probe.next_requests() == []


@pytest.mark.parametrize("context_tokens", [2048, 134, 20])
def test_probe_runs_one_and_then_several_warm_up_requests_behind_the_measured_one(context_tokens: int) -> None:
    clock = Clock()
    probe = Probe(vocab_size=1000, context_tokens=context_tokens, together=3, clock=clock)
    stages = []
    while requests := probe.next_requests():
        stages.append(requests)
        clock.now += 0.5
        for request in requests:
            assert probe.has(request.request_id) and not probe.finished
            probe.heard([1], [-0.5], ended=True)
    assert [len(requests) for requests in stages] == [1, 1, 1, 3] and probe.finished
    for request in (request for requests in stages for request in requests):
        assert len(request.token_ids) + request.sampling.max_new_tokens <= context_tokens
    counts = list(stages[1][0].token_ids)
    rests = [list(request.token_ids)[len(counts) :] for request in (*stages[2], *stages[3])]
    assert all(list(request.token_ids)[: len(counts)] == counts for request in (*stages[2], *stages[3]))
    assert len({tuple(rest) for rest in rests}) == 4 and all(0 < len(rest) < 8 for rest in rests)
    assert probe.trace.prefill_tokens_per_s == pytest.approx(len(stages[1][0].token_ids) / 0.5)


def test_probe_request_that_only_warms_up_may_fail() -> None:
    probe = Probe(vocab_size=1000, context_tokens=2048, together=3)
    for _ in range(2):
        probe.next_requests()
        assert probe.proves
        probe.heard([1], [-0.5], ended=True)
    assert len(probe.next_requests()) == 1 and not probe.finished and not probe.proves
    probe.stop("no memory")
    assert probe.finished and not probe.problem and probe.next_requests() == []


def test_probe_of_an_embedding_model_measures_the_prompt_alone() -> None:
    clock = Clock()
    probe = Probe(vocab_size=1000, context_tokens=2048, embeds=True, clock=clock)
    for _ in range(2):
        (request,) = probe.next_requests()
        clock.now += 0.5
        probe.heard([], [0.6, 0.8], ended=True)
    assert request.embed and probe.finished
    assert probe.trace.prefill_tokens_per_s == pytest.approx(len(request.token_ids) / 0.5)
    assert (probe.trace.decode_step_ms, probe.trace.values) == (0.0, [0.6, 0.8] * 2)
