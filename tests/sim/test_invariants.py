"""What holds in every replay: no byte and no request is lost, and the same seed gives the same run."""

from functools import cache
from math import isnan

import pytest

from kv_kinds.layout import state, window
from sim import report
from sim.policies import SYSTEMS
from tests.sim.worlds import GB, SMALL, crowded, models, replay

KNOWN = models(*"abcdef", kv=100_000, context_tokens=4096)
OF_KINDS = models(*"abcdef", kv=80_000, other_kinds=(window(60_000, 512, 256), state(60 << 20, 2)), context_tokens=4096)
SIZES = {"muxserve": (1, 1, 1)}
"""Of the groups, where two of one device are not enough: two models of the six fit on each."""


def run(seed, policy, sizes=(), known=KNOWN, **settings):
    requests = crowded(seed)
    sizes = sizes or SIZES.get(policy, (1, 1))
    return replay(requests, known, policy, sizes, SMALL, check_every_s=0.25, settings=settings), requests


@cache
def first_run(seed, policy):
    """The same for all tests that only look at it."""
    return run(seed, policy)


@pytest.mark.parametrize("policy", sorted(SYSTEMS))
@pytest.mark.parametrize("seed", range(4))
def test_replay_conserves_bytes_and_ends_every_request_with_all_its_tokens(seed, policy):
    outcome, requests = first_run(seed, policy)
    for request in requests:
        if policy == "static" and request.failed == "its model has no place":
            continue
        assert request.served and not request.failed, request
        assert request.generated == request.output_tokens
        assert request.arrival < request.first_at <= request.ended_at
    for group in outcome.system.groups:
        held = sum(group.memory.held(name) for name in group.residents)
        ledger = group.memory.device.ledger
        assert ledger.leased + ledger.free + ledger.booked == SMALL.capacity_bytes
        assert held + sum(group.memory.weights(name) for name in group.residents) == ledger.leased
        assert all(resident.engine is None or resident.engine.empty for resident in group.residents.values())


@pytest.mark.parametrize(("policy", "parks"), [("prism", True), ("qlm", False)])
def test_replay_of_models_with_windows_and_states_loses_no_byte_and_ends_every_request(policy, parks):
    outcome, requests = run(0, policy, (1,), known=OF_KINDS)
    assert all(request.served and request.generated == request.output_tokens for request in requests)
    assert (sum(request.parked for request in requests) > 0) == parks
    for group in outcome.system.groups:
        assert all(resident.engine is None or not resident.engine.used_bytes for resident in group.residents.values())


def test_crowded_requests_on_one_group_make_models_share_memory():
    outcome, requests = run(0, "prism", (1,), idle_s="45", patience_s="inf", relieve="false")
    (group,) = outcome.system.groups
    assert group.counts.hibernations >= 4 and group.memory.reclaimed_bytes > 0
    assert sum(request.parked for request in requests) > 0 and all(request.served for request in requests)


@pytest.mark.parametrize("policy", sorted(SYSTEMS))
def test_replay_of_the_same_requests_gives_the_same_report(policy):
    reports = []
    for replayed in (first_run, run):
        outcome, _ = replayed(3, policy)
        result = report.build(outcome)
        result["run"] = result["run"]["events"]
        reports.append(result)
    assert reports[0] == reports[1] and reports[0]["all"]["requests"] == 400


def test_static_serves_no_model_for_which_there_is_no_room():
    outcome, requests = run(1, "static", (1,))
    homeless = {request.model for request in requests if request.failed}
    assert homeless and outcome.system.figures["models without a place"] == len(homeless)
    assert all(isnan(request.ended_at) for request in requests if request.model in homeless)
    assert report.build(outcome)["all"]["attainment"] < 1.0


def test_requests_not_served_within_their_patience_have_failed_and_count_as_missed():
    requests = crowded(2, count=60)
    outcome = replay(
        requests, models(*"abcdef", kv=100_000, context_tokens=4096, weights=GB), "prism", (1,), SMALL, patience_s=0.0
    )
    total = report.build(outcome)["all"]
    failed = [request for request in requests if request.failed]
    assert failed and total["served"] == len(requests) - len(failed) and total["attainment"] <= total["served"] / 60
