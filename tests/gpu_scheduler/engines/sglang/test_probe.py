from __future__ import annotations

import pytest

from gpu_scheduler.engines.sglang.probe import Probe
from tests.gpu_scheduler.engines.sglang.scripted import Clock


def test_the_probe_runs_its_stages_one_after_the_other_and_measures_the_last() -> None:
    clock = Clock()
    probe = Probe(vocab_size=1000, context_tokens=2048, clock=clock)
    first = probe.next_request()
    assert first is not None and probe.next_request() is None
    probe.heard([1], [-0.5], ended=True)
    second = probe.next_request()
    assert second is not None and second.request_id != first.request_id
    assert list(second.token_ids)[:8] != list(first.token_ids)[:8]
    clock.now += 0.5
    probe.heard([2], [-0.1], ended=False)
    for token in (3, 4):
        clock.now += 0.01
        probe.heard([token], [-0.2], ended=token == 4)
    assert probe.finished and probe.next_request() is None
    assert probe.trace.token_ids == [1, 2, 3, 4]
    assert probe.trace.prefill_tokens_per_s == pytest.approx(len(second.token_ids) / 0.5)
    assert probe.trace.decode_step_ms == pytest.approx(10.0)


def test_the_probe_fits_a_small_context() -> None:
    probe = Probe(vocab_size=10, context_tokens=20)
    request = probe.next_request()
    assert request is not None
    assert len(request.token_ids) + request.sampling.max_new_tokens <= 20


def test_a_probe_that_cannot_run_says_why() -> None:
    probe = Probe(vocab_size=10, context_tokens=200)
    probe.next_request()
    probe.stop("no memory")
    assert probe.finished and probe.problem == "no memory" and probe.next_request() is None
