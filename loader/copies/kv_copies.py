"""KV that goes from one engine's extents to another's, borrowed from balloond for the time of the copy like weights."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack, aclosing

from loader.copies.handoff_client import HandoffClient
from loader.copies.threads import Moved, counted
from loader.metrics import COPIED
from loader.policy import kv
from loader.policy.chunks import Pair
from loader.policy.kv import KvPiece
from loader.transfers.base import Borrowed, Transfer
from protos import engine_pb2
from services.errors import Invalid, Unavailable


class KvCopies:
    """Copies of KV, any number at a time, each in a thread."""

    def __init__(self, handoff: HandoffClient, transfer_for: Callable[[str], Transfer], chunk_bytes: int) -> None:
        self._handoff = handoff
        self._transfer_for = transfer_for
        self._chunk_bytes = chunk_bytes

    async def copy(self, source: engine_pb2.KvPlaces, target: engine_pb2.KvPlaces) -> int:
        """Fills the target's pieces with what the source's sequences hold and returns the bytes copied. Cancelled, it
        stops and waits for the thread.

        Raises NotFound when a lease or an extent is gone, Invalid when the places do not belong together, Unavailable
        while balloond is away or when the device fails."""
        if not _extent_ids(target):
            return 0
        if source.lease_id == target.lease_id or not _extent_ids(source):
            raise Invalid("KV goes from extents of one lease to those of another")
        async with AsyncExitStack() as stack:
            lent: dict[str, Sequence[Borrowed]] = {}
            # Leases are borrowed from in one order, whichever way KV moves: two copies that wait for each other would
            # wait for ever.
            for places in sorted((source, target), key=lambda places: places.lease_id):
                borrowed = self._handoff.borrowed(places.lease_id, _extent_ids(places))
                lent[places.lease_id] = await stack.enter_async_context(borrowed)
            sources, targets = lent[source.lease_id], lent[target.lease_id]
            plan = self._plan(source, sources, target, targets)
            transfer = self._transfer_for(sources[0].device)

            def work(moved: Moved) -> None:
                transfer.between(sources, targets, plan, lambda pair: moved(pair.nbytes))()

            try:
                async with aclosing(counted(work)) as steps:
                    async for _ in steps:
                        pass
            except OSError as error:
                raise Unavailable(f"the copy failed: {error.strerror or error}") from None
        nbytes = sum(pair.nbytes for pair in plan)
        COPIED.labels("kv").inc(nbytes)
        return nbytes

    def _plan(
        self,
        source: engine_pb2.KvPlaces,
        sources: Sequence[Borrowed],
        target: engine_pb2.KvPlaces,
        targets: Sequence[Borrowed],
    ) -> list[Pair]:
        if not source.page_tokens or len(source.sequences) != len(target.sequences):
            raise Invalid(f"{len(source.sequences)} sequences do not go into {len(target.sequences)}")
        plan: list[Pair] = []
        for left, right in zip(source.sequences, target.sequences, strict=True):
            skip_bytes = (right.first_token - left.first_token) // source.page_tokens * source.page_bytes
            try:
                plan += kv.pairs(_pieces(left, sources), _pieces(right, targets), skip_bytes, self._chunk_bytes)
            except ValueError as error:
                raise Invalid(f"the KV of {left.request_id}: {error}") from None
        return plan


def _extent_ids(places: engine_pb2.KvPlaces) -> list[int]:
    return sorted({piece.extent_id for one in places.sequences for piece in one.pieces})


def _pieces(sequence: engine_pb2.KvPlaces.Sequence, lent: Sequence[Borrowed]) -> list[KvPiece]:
    """Pieces of a sequence, by their extent's place in `lent`. Raises Invalid for a piece that is not within its
    extent."""
    number = {extent.id: i for i, extent in enumerate(lent)}
    for piece in sequence.pieces:
        if not 0 <= piece.offset <= piece.offset + piece.bytes <= lent[number[piece.extent_id]].nbytes:
            raise Invalid(f"bytes {piece.offset} to {piece.offset + piece.bytes} are not in extent {piece.extent_id}")
    return [KvPiece(number[piece.extent_id], piece.offset, piece.bytes) for piece in sequence.pieces]
