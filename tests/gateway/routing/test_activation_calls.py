"""Activation: one call for all who wait."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from gateway.routing.activation_calls import ActivationCalls
from protos import common_pb2, placement_pb2, placement_pb2_grpc
from services.errors import Refused, TimedOut, Unavailable
from services.rpc import rpc
from testing.patience import PATIENCE_S
from tests.gateway.fakes import FakePlacement


@pytest.fixture
async def placement(tmp_path: Path) -> AsyncIterator[FakePlacement]:
    placement = FakePlacement(str(tmp_path / "placement.sock"))
    await placement.start()
    yield placement
    await placement.die()


async def test_activations_caller_that_times_out_leaves_the_shared_call_running(placement: FakePlacement) -> None:
    asked, answer = asyncio.Event(), asyncio.Event()

    async def choose(_: Any) -> placement_pb2.Place:
        asked.set()
        await answer.wait()
        return placement_pb2.Place(group="g", address="a", residency=common_pb2.WAKING)

    placement.activate = choose
    async with rpc.channel(placement.address) as channel:
        activations = ActivationCalls(placement_pb2_grpc.PlacementStub(channel), time_out_s=10)
        impatient, patient = (asyncio.get_running_loop().create_task(activations.activate("m", 0)) for _ in range(2))
        await asyncio.wait_for(asked.wait(), PATIENCE_S)
        impatient.cancel()
        answer.set()
        assert (await patient).address == "a"
        assert len(placement.activations) == 1
        await activations.activate("m", 0)
        assert len(placement.activations) == 2


async def test_activation_refused_by_placement_is_refused_to_all_callers(placement: FakePlacement) -> None:
    placement.refusal = (grpc.StatusCode.RESOURCE_EXHAUSTED, "needs 5, free 3")
    async with rpc.channel(placement.address) as channel:
        activations = ActivationCalls(placement_pb2_grpc.PlacementStub(channel), time_out_s=10)
        answers = await asyncio.gather(*(activations.activate("m", 0) for _ in range(3)), return_exceptions=True)
    assert [type(answer) for answer in answers] == [Refused] * 3
    assert str(answers[0]) == "needs 5, free 3"
    assert len(placement.activations) == 1


async def test_activation_with_placement_away_or_silent_is_unavailable(
    placement: FakePlacement, tmp_path: Path
) -> None:
    async def never(_: Any) -> placement_pb2.Place:
        await asyncio.Event().wait()
        raise AssertionError

    placement.activate = never
    async with rpc.channel(placement.address) as there, rpc.channel(f"unix:{tmp_path}/none.sock") as nowhere:
        with pytest.raises(TimedOut):
            await ActivationCalls(placement_pb2_grpc.PlacementStub(there), time_out_s=0.05).activate("m", 0)
        with pytest.raises(Unavailable):
            await ActivationCalls(placement_pb2_grpc.PlacementStub(nowhere), time_out_s=10).activate("m", 0)
