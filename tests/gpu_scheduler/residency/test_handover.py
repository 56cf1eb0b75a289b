"""KV that goes to another group: what is sent, and what is not worth it."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from gpu_scheduler.policy.memory.migrated_prefixes import MigratedPrefixes
from gpu_scheduler.residency import handover as module
from gpu_scheduler.residency.handover import Handover
from gpu_scheduler.residents import Residents
from protos import common_pb2, engine_pb2

PAGE = 16


def places(**tokens: int) -> engine_pb2.KvPlaces:
    sequences = [
        engine_pb2.KvPlaces.Sequence(request_id=name, token_ids=range(count)) for name, count in tokens.items()
    ]
    return engine_pb2.KvPlaces(sequences=sequences, page_tokens=PAGE, page_bytes=PAGE)


class Source:
    """An engine that says where KV lies: first of what runs, then of what has stopped."""

    def __init__(self, running: engine_pb2.KvPlaces, stopped: engine_pb2.KvPlaces) -> None:
        self._told = {True: running, False: stopped}
        self.asked: list[bool] = []

    def command(self, message: engine_pb2.ToEngine) -> SimpleNamespace:
        live = message.export_kv.live
        self.asked.append(live)

        async def answer() -> engine_pb2.KvPlaces:
            return self._told[live]

        return SimpleNamespace(places=answer, done=answer)


class Target:
    """The other group, which takes everything."""

    last: Target

    def __init__(self, address: str) -> None:
        self.taken: list[engine_pb2.KvPlaces] = []
        Target.last = self

    async def take_kv(self, model: str, generation: int, given: engine_pb2.KvPlaces) -> SimpleNamespace:
        self.taken.append(given)
        return SimpleNamespace(bytes=sum(len(one.token_ids) for one in given.sequences))

    async def close(self) -> None: ...


@pytest.mark.parametrize(
    ("stopped", "sent"),
    [
        ({"a": 800, "b": 1600}, 1),
        ({"a": 832, "b": 1632}, 1),
        ({"a": 800, "b": 1600, "late": 512}, 1),
        ({"a": 800 + 528, "b": 1600}, 2),
        ({"a": 800, "b": 1600, "late": 4000}, 2),
        ({}, 1),
    ],
)
async def test_kv_generated_since_the_first_copy_is_sent_only_if_it_exceeds_a_short_step(
    stopped: dict[str, int], sent: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "GpuSchedulerClient", Target)
    residents = Residents(lambda resident: None)
    resident = residents.enter(common_pb2.ModelSpec(name="llama"))
    source = Source(places(a=800, b=1600), places(**stopped))
    given = await Handover(residents, None, MigratedPrefixes()).give(resident, source, "unix:/other")
    assert given == list(stopped), "the requests that are told to go on there"
    assert source.asked == [True, False]
    assert len(Target.last.taken) == sent


def test_migrated_pages_count_as_cached_only_if_they_are_whole_and_had_room() -> None:
    room = engine_pb2.KvPlaces(page_tokens=PAGE, page_bytes=100)
    for first, pages in ((0, (2, 1)), (32, (1,)), (48, ())):
        pieces = [engine_pb2.KvPlaces.Piece(bytes=100 * count) for count in pages]
        room.sequences.add(first_token=first, pieces=pieces)
    came = list(module._cached(places(a=64, b=64, c=48), room))
    assert [len(tokens) for _, tokens in came] == [48, 48, 48]
