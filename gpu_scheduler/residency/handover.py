"""A model moves to another group of the node together with the KV of its running requests: both sides of the move.

The group that the model leaves asks its engine where the KV of the running requests lies; the other group's engine
makes room for it in its prefix cache, and the loader copies from device to device. Then the requests stop, the KV that
they have computed meanwhile follows, and only then are they handed back. Their gateways send them to the other group,
which finds all but the last page of each. If any of it fails, the KV is computed again there, as without a handover.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Sequence

from gpu_scheduler.client import GpuSchedulerClient
from gpu_scheduler.engines.engine import Command, EngineProcess
from gpu_scheduler.policy.memory.migrated_prefixes import MigratedPrefixes
from gpu_scheduler.residents import Resident, Residents
from loader.client import LoaderClient
from protos import common_pb2, engine_pb2, gpu_scheduler_pb2
from services.errors import NotFound, PrismError, Unmet
from services.runtime import tasks
from services.telemetry import log

_log = log.get(__name__)
_WITHIN_S = 5.0
"""Seconds that a handover may take: clients wait meanwhile, and beyond that computing the KV again is better."""
_COMPUTED_TOKENS = 512
"""Most tokens whose KV is left behind when the requests stop: they are computed together with the last page of each
request, in the same step and hardly longer; to fetch their KV takes 30 ms in which clients wait."""
_HEARD_S = 0.2
"""Seconds after a timeout until the other group knows that its caller has gone: after that the places may hold
something else."""
_SETTLES_S = 2.0
"""Seconds after a failed copy until the places are given up: a loader that died may have started device copies that are
still under way."""


class Handover:
    """Both sides of a handover, for one group."""

    def __init__(self, residents: Residents, loader: LoaderClient | None, migrated_prefixes: MigratedPrefixes) -> None:
        self._residents = residents
        self._loader = loader
        self._migrated_prefixes = migrated_prefixes

    async def give(self, resident: Resident, engine: EngineProcess, successor: str) -> list[str] | None:
        """Has the group at `successor` take the KV of the engine's running requests: most of it while they run, then
        they are stopped, and the rest follows. Returns the ids of those requests; None if that failed. Stopped requests
        end with the Drain that has to follow in either case."""
        client = GpuSchedulerClient(successor)
        try:
            async with asyncio.timeout(_WITHIN_S):
                began = time.monotonic()
                ahead = await self._places(engine, live=True)
                nbytes = await self._send(client, resident, ahead)
                stopped = time.monotonic()
                places = await self._places(engine, live=False)
                told = time.monotonic()
                more = _tokens_behind(ahead, places) > _COMPUTED_TOKENS
                rest = await self._send(client, resident, places) if more else 0
                ended = time.monotonic()
        except (PrismError, TimeoutError) as error:
            if isinstance(error, TimeoutError):
                await asyncio.sleep(_HEARD_S)
            _log.warning("KV stays behind", model=resident.spec.name, to=successor, why=str(error) or "no answer")
            return None
        finally:
            await client.close()
        _log.info(
            "KV handed over",
            model=resident.spec.name,
            to=successor,
            requests=len(places.sequences),
            bytes=nbytes + rest,
            bytes_behind=rest,
            ms=round(1e3 * (ended - began), 1),
            stopped_ms=round(1e3 * (ended - stopped), 1),
            places_ms=round(1e3 * (told - stopped), 1),
        )
        return [one.request_id for one in places.sequences]

    @staticmethod
    async def _places(engine: EngineProcess, *, live: bool) -> engine_pb2.KvPlaces:
        command = engine.command(engine_pb2.ToEngine(export_kv=engine_pb2.ExportKv(live=live)))
        places = await command.places()
        await command.done()
        return places

    async def _send(self, client: GpuSchedulerClient, resident: Resident, places: engine_pb2.KvPlaces) -> int:
        """Has the other group take the KV. Returns the bytes that it did not have yet."""
        if not places.sequences:
            return 0
        return (await client.take_kv(resident.spec.name, resident.spec.generation, places)).bytes

    async def take(self, request: gpu_scheduler_pb2.TakeKvRequest) -> gpu_scheduler_pb2.TakeKvResponse:
        """Takes the KV of another group's running requests into this group's engine. Raises NotFound, Unmet, and the
        errors of the engine and the loader. If the caller goes away the copy goes on to its end, because the memory
        being written to is used for nothing else meanwhile, but its result is not used: the places that it came from
        are not kept any more."""
        engine = self._engine(request.model, request.generation)
        if self._loader is None:
            raise Unmet("this group has no loader to copy KV")
        gone = asyncio.Event()
        work = tasks.spawn(
            self._take(request.model, engine, self._loader, request.places, gone), f"KV of {request.model}"
        )
        try:
            return await asyncio.shield(work)
        except asyncio.CancelledError:
            gone.set()
            raise

    async def _take(
        self, model: str, engine: EngineProcess, loader: LoaderClient, places: engine_pb2.KvPlaces, gone: asyncio.Event
    ) -> gpu_scheduler_pb2.TakeKvResponse:
        began = time.monotonic()
        sequences = [
            engine_pb2.KvPlaces.Sequence(
                token_ids=one.token_ids, tokens_to_come=one.tokens_to_come, adapter=one.adapter
            )
            for one in places.sequences
        ]
        wanted = engine_pb2.ImportKv(sequences=sequences, page_tokens=places.page_tokens, page_bytes=places.page_bytes)
        command = engine.command(engine_pb2.ToEngine(import_kv=wanted))
        room = await command.places()
        made_room = time.monotonic()
        try:
            something = any(one.pieces for one in room.sequences)
            copied = await loader.copy_kv(places, room) if something else 0
        except Exception:
            tasks.spawn(self._give_up(engine, command), "room for KV that did not come")
            raise
        copying_ended = time.monotonic()
        engine.imported(command, failed=gone.is_set())
        await command.done()
        ended = time.monotonic()
        if not gone.is_set():
            for adapter, tokens in _cached(places, room):
                self._migrated_prefixes.came(adapter or model, [tokens], ended)
        _log.info(
            "KV taken",
            bytes=copied,
            pieces=sum(len(one.pieces) for one in room.sequences),
            room_ms=round(1e3 * (made_room - began), 1),
            copy_ms=round(1e3 * (copying_ended - made_room), 1),
            known_ms=round(1e3 * (ended - copying_ended), 1),
        )
        return gpu_scheduler_pb2.TakeKvResponse(bytes=copied, seconds=ended - began)

    @staticmethod
    async def _give_up(engine: EngineProcess, command: Command) -> None:
        await asyncio.sleep(_SETTLES_S)
        engine.imported(command, failed=True)

    def _engine(self, model: str, generation: int) -> EngineProcess:
        resident = self._residents.get(model)
        if resident is None:
            raise NotFound(f"{model} is not on this group")
        if resident.residency != common_pb2.ACTIVE or resident.engine is None:
            raise Unmet(f"{model} is not active on this group")
        if resident.spec.generation != generation:
            raise Unmet(f"{model} is of generation {resident.spec.generation} here, the KV is of {generation}")
        return resident.engine


def _tokens_behind(ahead: engine_pb2.KvPlaces, places: engine_pb2.KvPlaces) -> int:
    """Tokens whose KV is in `places` and was not sent ahead."""
    sent = {one.request_id: len(one.token_ids) for one in ahead.sequences}
    return sum(max(0, len(one.token_ids) - sent.get(one.request_id, 0)) for one in places.sequences)


def _cached(places: engine_pb2.KvPlaces, room: engine_pb2.KvPlaces) -> Iterator[tuple[str, Sequence[int]]]:
    """For each sequence, (its adapter, the tokens whose KV this group's engine has now): there may not have been room
    for all."""
    for one, taken in zip(places.sequences, room.sequences, strict=True):
        pages = sum(piece.bytes for piece in taken.pieces) // room.page_bytes
        yield one.adapter, one.token_ids[: taken.first_token + pages * room.page_tokens]
