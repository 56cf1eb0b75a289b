"""New numbers of the KV blocks (envelopes) that a move has put elsewhere, on the device."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from gpu_scheduler.engines.sglang.policy.layout import Indices

if TYPE_CHECKING:
    import torch

    from gpu_scheduler.engines.sglang.kv.slot_transfer import Ids


class Renumbering:
    """One move of envelopes, from `sources` to `destinations`. Its memory grows with the number of envelopes that
    move: a table of all envelopes that have addresses may be larger than the model."""

    def __init__(self, ids: Ids, sources: Indices, destinations: Indices, envelope_slots: int) -> None:
        """`ids`: takes numbers to the device. `envelope_slots`: slots of an envelope."""
        order = np.argsort(sources)
        self._size = envelope_slots
        self._old, self._new = ids.send(sources[order]), ids.send(destinations[order])

    def of(self, slots: torch.Tensor) -> torch.Tensor:
        """The new slots for `slots`, of the same shape and dtype; slots of envelopes that were not moved stay."""
        import torch

        if not len(self._old):
            return slots
        envelopes = slots.long() // self._size
        near = torch.searchsorted(self._old, envelopes).clamp_(max=len(self._old) - 1)
        envelopes = torch.where(self._old[near] == envelopes, self._new[near], envelopes)
        return (envelopes * self._size + slots % self._size).to(slots.dtype)
