"""Who follows a group hears at once what decisions rest on, and figures as often as it asks for them."""

import asyncio
from types import SimpleNamespace

import pytest

from gpu_scheduler.client import GpuSchedulerClient
from gpu_scheduler.leaving import Leaving
from gpu_scheduler.residents import Residents
from gpu_scheduler.server import NAME, GpuSchedulerServicer
from gpu_scheduler.telling import Telling
from protos import common_pb2, gpu_scheduler_pb2, gpu_scheduler_pb2_grpc
from services import rpc
from services.watch import Watched


def state(**facts):
    told = gpu_scheduler_pb2.GroupState(group="g")
    told.memory.add(device="d", capacity_bytes=100)
    told.residents.add(**({"model": "m", "residency": common_pb2.ACTIVE, "running": 1} | facts))
    return told


def test_figures_alone_wait_until_the_time_is_over():
    telling = Telling(0.5)
    assert telling.wants(state(decode_tokens=1), 10.0)
    assert not telling.wants(state(decode_tokens=2), 10.4)
    assert telling.wants(state(decode_tokens=3), 10.5)
    assert not telling.wants(state(decode_tokens=3, running=7, kv_used_bytes=5), 10.9)


@pytest.mark.parametrize(
    "facts",
    [
        {"residency": common_pb2.WAKING},
        {"running": 0},
        {"waiting": 1},
        {"kv_lacking_bytes": 8},
        {"reason": "it died"},
        {"outdated": True},
        {"model": "other"},
    ],
)
def test_what_decisions_rest_on_is_told_at_once(facts):
    telling = Telling(0.5)
    assert telling.wants(state(), 10.0) and not telling.wants(state(), 10.1)
    assert telling.wants(state(**facts), 10.2)
    assert telling.wants(state(), 10.3), "and that it is as it was"


def test_a_group_that_stops_or_takes_no_models_or_has_other_memory_says_so_at_once():
    telling = Telling(0.5)
    told = state()
    assert telling.wants(told, 10.0)
    for change in ({"stopping": True}, {"drained": True}, {"balloond_error": "away"}, {"address": "elsewhere"}):
        for name, value in change.items():
            setattr(told, name, value)
        assert telling.wants(told, 10.1), change
    told.memory[0].capacity_bytes = 200
    assert telling.wants(told, 10.1)


def test_all_is_told_to_who_asks_for_nothing_and_once_a_second_to_who_asks_for_less():
    eager, patient = Telling(0.0), Telling(60.0)
    assert all(eager.wants(state(), 10.0 + i / 10) for i in range(30))
    assert [i for i in range(30) if patient.wants(state(), 10.0 + i / 10)] == [0, 10, 20]


async def test_a_follower_of_many_groups_gets_a_residency_at_once_and_no_figures_between(tmp_path):
    states = [state()]
    changes = Watched(None)
    leaving = Leaving(Residents(lambda resident: None), lambda: 0, lambda: None)
    report = SimpleNamespace(build=lambda: states[-1])
    server = rpc.Server(f"unix:{tmp_path}/g.sock")
    servicer = GpuSchedulerServicer(None, None, None, None, None, report, leaving, changes)
    server.add(gpu_scheduler_pb2_grpc.add_GpuSchedulerServicer_to_server, servicer, NAME)
    await server.start()
    client = GpuSchedulerClient(server.address)
    heard = client.watch(lambda: 1000)
    try:
        async with asyncio.timeout(20):
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
