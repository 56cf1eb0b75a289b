"""Placement that starts again knows what models were asked for, in the whole system with echo engines."""

from __future__ import annotations

import time
from functools import partial

import pytest

from placement.planning import traffic_file
from placement.policy.traffic import HOUR_S, TrafficCounts, TrafficHour
from testing.systems.local import MODELS, World, world

pytestmark = pytest.mark.asyncio
PROMPT = list(range(20, 60))
DEVICES = {"cpu:0": 48 << 20, "cpu:1": 48 << 20}


async def prospects(it: World) -> dict[str, tuple[str, str]]:
    """Model -> (group on which it would come up, why)."""
    found = {}
    for model in MODELS:
        prospect = (await it.placement.explanation(model)).prospect
        found[model] = prospect.group, prospect.reason
    return found


async def counted(it: World) -> bool:
    """Whether placement has seen tokens of every model."""
    cluster = await it.placement.cluster()
    return {m.model for group in cluster.groups for m in group.models if m.tokens_per_s > 0} == {*MODELS}


async def test_placement_with_traffic_of_the_hour_before_has_places_before_any_request_and_keeps_what_it_sees() -> None:
    async with world("echo", devices=DEVICES) as it:
        path = str(it.local.state / "traffic.json")
        assert len({group for group, _ in (await prospects(it)).values()}) == 1  # nothing is known: all to the first
        async with it.without("placement"):
            hour = int(time.time() // HOUR_S)
            asked = {model: TrafficCounts(10, tokens, 0, 5) for model, tokens in zip(MODELS, (9, 5, 3), strict=True)}
            before = {hour - 1: TrafficHour(HOUR_S, asked), hour: TrafficHour(HOUR_S, asked)}
            traffic_file.write(path, traffic_file.encoded(before))
        places = await prospects(it)
        assert all("by the traffic of earlier hours" in reason for _, reason in places.values())
        assert len({group for group, _ in places.values()}) == 2
        for model, (group, _) in places.items():
            await it.complete(model, PROMPT, 4)
            cluster = await it.placement.cluster()
            assert group in [each.group for each in cluster.groups if any(m.model == model for m in each.models)]
        await it.until(partial(counted, it), "placement has heard of all requests")
        await it.system.running["placement"].end()
        hours, _ = traffic_file.read(path)
        seen = {model: sum(h.models[model].requests for h in hours.values() if model in h.models) for model in MODELS}
        assert seen == dict.fromkeys(MODELS, 21)

        async with it.without("placement"):  # it has ended, and starts again
            with open(path, "wb") as file:
                file.write(b"damaged")
        await it.complete(MODELS[0], PROMPT, 4)
