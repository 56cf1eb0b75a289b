"""Who follows a group hears at once what decisions rest on, and figures as often as it asks for them."""

import asyncio
from types import SimpleNamespace

import pytest

from gpu_scheduler.client import GpuSchedulerClient
from gpu_scheduler.report.report_rate import least_s, telling
from gpu_scheduler.residency.graceful_exit import GracefulExit
from gpu_scheduler.residents import Residents
from gpu_scheduler.server import NAME, GpuSchedulerServicer
from protos import common_pb2, gpu_scheduler_pb2, gpu_scheduler_pb2_grpc
from services.rpc import rpc
from services.rpc.watch import Watched
from testing.patience import PATIENCE_S


def state(**facts):
    told = gpu_scheduler_pb2.GroupState(group="g")
    told.memory.add(device="d", capacity_bytes=100)
    told.residents.add(**({"model": "m", "residency": common_pb2.ACTIVE, "running": 1} | facts))
    return told


def told(follower, at, **facts):
    return not follower.wait_s(state(**facts), at)


def test_report_of_changed_figures_alone_waits_for_the_rest_of_the_interval():
    follower = telling(0.5)
    assert told(follower, 10.0, decode_tokens=1)
    assert follower.wait_s(state(decode_tokens=2), 10.4) == pytest.approx(0.1)
    assert told(follower, 10.5, decode_tokens=3)
    assert follower.wait_s(state(decode_tokens=4, running=7, idle_s=3.0), 10.75) == 0.25


def test_follower_without_an_interval_gets_figures_ten_times_a_second_and_facts_sooner():
    follower = telling(0.0)
    assert told(follower, 10.0, decode_tokens=1)
    assert follower.wait_s(state(decode_tokens=2), 10.02) == pytest.approx(0.08)
    assert told(follower, 10.03, decode_tokens=2, running=0)


def test_follower_of_a_hundred_groups_hears_no_more_in_all_than_one_of_twenty():
    assert (least_s(0.0), least_s(0.001)) == (0.02, 0.02)
    for groups in (20, 60, 100):
        assert groups / least_s(0.001 * groups) == pytest.approx(1000)
    assert least_s(1.0) == 0.1


@pytest.mark.parametrize(
    "facts",
    [
        {"residency": common_pb2.WAKING},
        {"running": 0},
        {"waiting": 1},
        {"kv_lacking_bytes": 1},
        {"kv_used_bytes": 70},
        {"kept_bytes": 8},
        {"quota_bytes": 8},
        {"reason": "it died"},
        {"outdated": True},
        {"model": "other"},
    ],
)
def test_fact_that_decisions_rest_on_is_reported_at_once(facts):
    follower = telling(0.5)
    assert told(follower, 10.0) and not told(follower, 10.1)
    assert told(follower, 10.2, **facts)
    assert told(follower, 10.3), "and that it is as it was"


def test_a_group_that_stops_or_takes_no_models_or_has_other_bookings_says_so_at_once():
    follower, now = telling(0.5), state()
    assert not follower.wait_s(now, 10.0)
    for name, value in {"stopping": True, "drained": True, "balloond_error": "away", "address": "elsewhere"}.items():
        setattr(now, name, value)
        assert not follower.wait_s(now, 10.1), name
    now.memory[0].bookings.add(model="buried", quota_bytes=7)
    assert not follower.wait_s(now, 10.1)
    now.memory[0].free_bytes = 12
    assert follower.wait_s(now, 10.1)


def test_an_idle_model_that_has_served_in_between_is_not_thought_idle_for_long():
    follower = telling(1.0)
    assert told(follower, 10.0, running=0, decode_tokens=5)
    assert not told(follower, 10.75, running=0, decode_tokens=5, idle_s=0.75)
    assert told(follower, 10.8, running=0, decode_tokens=9, idle_s=0.1)


def test_follower_without_an_interval_hears_every_report_and_a_patient_one_each_second():
    eager, patient = telling(0.0), telling(60.0)
    assert all(told(eager, 10.0 + i / 8) for i in range(30))
    assert [i for i in range(30) if told(patient, 10.0 + i / 8)] == [0, 8, 16, 24]


async def test_a_follower_of_many_groups_gets_a_residency_at_once_and_no_figures_between(tmp_path):
    states = [state()]
    changes = Watched(None)
    leaving = GracefulExit(Residents(lambda resident: None), lambda: 0, lambda: None)
    report = SimpleNamespace(build=lambda: states[-1])
    server = rpc.Server(f"unix:{tmp_path}/g.sock")
    servicer = GpuSchedulerServicer(None, None, None, None, None, None, report, leaving, changes)
    server.add(gpu_scheduler_pb2_grpc.add_GpuSchedulerServicer_to_server, servicer, NAME)
    await server.start()
    client = GpuSchedulerClient(server.address)
    heard = client.watch(lambda: 1000)
    try:
        async with asyncio.timeout(PATIENCE_S):
            assert (await anext(heard)).residents[0].residency == common_pb2.ACTIVE
            for tokens in range(1, 6):
                states.append(state(decode_tokens=tokens))
                changes.set(None)
            states.append(state(residency=common_pb2.HIBERNATING, decode_tokens=6))
            changes.set(None)
            told = (await anext(heard)).residents[0]
            assert (told.residency, told.decode_tokens) == (common_pb2.HIBERNATING, 6)
    finally:
        await heard.aclose()
        await client.close()
        await server.stop(0)
