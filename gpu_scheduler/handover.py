"""A model moves to another group of the node, and what runs goes along with its KV: both sides of it.

The group that is left has its engine stop what runs and say where its KV lies; the other one's engine makes room for it
in its prefix cache, the loader copies from device to device, and only then are the requests handed back. Their gateways
send them to the other group, which finds all but the last page of each. When any of it fails they are computed again
there, as they would be without it.
"""

from __future__ import annotations

import asyncio
import time

from gpu_scheduler.client import GpuSchedulerClient
from gpu_scheduler.engines.base import Engine
from gpu_scheduler.residents import Resident, Residents
from loader.client import LoaderClient
from protos import common_pb2, engine_pb2, gpu_scheduler_pb2
from services import log
from services.errors import NotFound, PrismError, Unmet

_log = log.get(__name__)
_WITHIN_S = 5.0
"""Clients wait meanwhile: computing again is better than more of it."""


class Handover:
    """One group's."""

    def __init__(self, residents: Residents, loader: LoaderClient | None) -> None:
        self._residents = residents
        self._loader = loader

    async def give(self, resident: Resident, engine: Engine, successor: str) -> bool:
        """Stops what runs and has the group at `successor` take its KV. False when that failed. What was stopped ends
        with the Drain that has to follow in either case."""
        began = time.monotonic()
        client = GpuSchedulerClient(successor)
        try:
            async with asyncio.timeout(_WITHIN_S):
                command = engine.command(engine_pb2.ToEngine(export_kv=engine_pb2.ExportKv()))
                places = await command.places()
                await command.done()
                taken = 0
                if places.sequences:
                    answer = await client.take_kv(resident.spec.name, resident.spec.generation, places)
                    taken = answer.bytes
        except (PrismError, TimeoutError) as error:
            _log.warning("KV stays behind", model=resident.spec.name, to=successor, why=str(error) or "no answer")
            return False
        finally:
            await client.close()
        _log.info(
            "KV handed over",
            model=resident.spec.name,
            to=successor,
            requests=len(places.sequences),
            bytes=taken,
            ms=round(1e3 * (time.monotonic() - began), 1),
        )
        return True

    async def take(self, request: gpu_scheduler_pb2.TakeKvRequest) -> gpu_scheduler_pb2.TakeKvResponse:
        """Raises NotFound, Unmet, and what an engine or the loader refused it with."""
        began = time.monotonic()
        engine = self._engine(request.model, request.generation)
        if self._loader is None:
            raise Unmet("this group has no loader to copy KV")
        places = request.places
        sequences = [engine_pb2.KvPlaces.Sequence(token_ids=one.token_ids) for one in places.sequences]
        wanted = engine_pb2.ImportKv(sequences=sequences, page_tokens=places.page_tokens, page_bytes=places.page_bytes)
        command = engine.command(engine_pb2.ToEngine(import_kv=wanted))
        room = await command.places()
        failed = True
        try:
            copied = await self._loader.copy_kv(places, room)
            failed = False
        finally:
            engine.imported(command, failed)
        await command.done()
        return gpu_scheduler_pb2.TakeKvResponse(bytes=copied, seconds=time.monotonic() - began)

    def _engine(self, model: str, generation: int) -> Engine:
        resident = self._residents.get(model)
        if resident is None:
            raise NotFound(f"{model} is not on this group")
        if resident.residency != common_pb2.ACTIVE or resident.engine is None:
            raise Unmet(f"{model} is not active on this group")
        if resident.spec.generation != generation:
            raise Unmet(f"{model} is of generation {resident.spec.generation} here, the KV is of {generation}")
        return resident.engine
