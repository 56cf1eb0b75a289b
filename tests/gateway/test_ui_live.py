"""Looking while somebody wants to see."""

from __future__ import annotations

import asyncio
import contextlib

from gateway.ui.live import Live
from gateway.ui.look import ServiceReply
from protos import placement_pb2
from services.errors import Unavailable


class Placement:
    """Counts the looks; away while `away`."""

    def __init__(self) -> None:
        self.looks = 0
        self.away = False
        self.live = Live(self.look, lambda: float(self.looks), every_s=0.0)

    async def look(self) -> ServiceReply:
        self.looks += 1
        if self.away:
            raise Unavailable("gone")
        return ServiceReply(float(self.looks), placement_pb2.Cluster())


async def turns(count: int = 20) -> None:
    """Lets everything run that can."""
    for _ in range(count):
        await asyncio.sleep(0)


async def test_live_looks_only_while_a_viewer_follows() -> None:
    placement = Placement()
    await turns()
    assert placement.looks == 0
    async with contextlib.aclosing(placement.live.follow()) as views:
        for expected in (1, 2, 3):
            view = await anext(views)
            assert view.told is not None and view.told.at >= expected
    looks = placement.looks
    await turns()
    assert placement.looks == looks
    async with contextlib.aclosing(placement.live.follow()) as views:
        await anext(views)
    assert placement.looks > looks


async def test_live_viewers_share_looks_until_the_last_one_leaves() -> None:
    placement = Placement()
    first, second = placement.live.follow(), placement.live.follow()
    seen = await asyncio.gather(anext(first), anext(second))
    assert seen[0] is seen[1]
    await first.aclose()
    before = placement.looks
    await anext(second)
    await anext(second)
    assert placement.looks > before
    await second.aclose()
    before = placement.looks
    await turns()
    assert placement.looks == before


async def test_live_view_keeps_the_last_state_while_placement_is_away() -> None:
    placement = Placement()
    async with contextlib.aclosing(placement.live.follow()) as views:
        told = (await anext(views)).told
        placement.away = True
        while not (view := await anext(views)).away:
            told = view.told
        assert (view.away, view.told) == ("gone", told)
        placement.away = False
        while (view := await anext(views)).away:
            pass
        assert view.told is not told


async def test_live_close_ends_present_and_later_viewers() -> None:
    placement = Placement()
    views = placement.live.follow()
    await anext(views)
    placement.live.close()
    assert [view async for view in views] == []
    assert [view async for view in placement.live.follow()] == []
