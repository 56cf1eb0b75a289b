"""KV pages chosen on the host, with the device told by asynchronous copies: the token path that is to be measured.

Two delays are kept apart, because they end at different moments:
- a freed page may be used again as soon as its id is known on the host (whoever writes to it is queued behind all
  readers);
- an extent whose last page was freed may be unmapped only when nothing that was launched before can touch it, that
  is, after the event recorded on the forward stream behind the last launch.
Nothing here waits for the device: uploads leave from pinned buffers, freed ids arrive in pinned buffers, events are
only asked.
"""

from __future__ import annotations

import heapq
from collections import deque
from typing import Any

import numpy as np
import torch


class PinnedRing:
    """Pinned int64 buffers; one is written again only after the copy out of it, or into it, is known to be over."""

    def __init__(self, capacity: int, buffers: int = 8) -> None:
        self._capacity = capacity
        self._idle: list[torch.Tensor] = [self._new() for _ in range(buffers)]
        self._leaving: deque[tuple[torch.cuda.Event, torch.Tensor]] = deque()
        self._events: list[torch.cuda.Event] = []

    def _new(self) -> torch.Tensor:
        return torch.empty(self._capacity, dtype=torch.int64, pin_memory=True)

    def event(self) -> torch.cuda.Event:
        return self._events.pop() if self._events else torch.cuda.Event()

    def done_with(self, event: torch.cuda.Event) -> None:
        self._events.append(event)

    def take(self) -> torch.Tensor:
        """A buffer that no copy uses. A burst grows the ring rather than wait."""
        while self._leaving and self._leaving[0][0].query():
            event, buffer = self._leaving.popleft()
            self._events.append(event)
            self._idle.append(buffer)
        return self._idle.pop() if self._idle else self._new()

    def give(self, buffer: torch.Tensor) -> None:
        self._idle.append(buffer)

    def give_after_copy(self, buffer: torch.Tensor) -> None:
        """Return a buffer from which a copy was queued on the current stream."""
        event = self.event()
        event.record()
        self._leaving.append((event, buffer))


class FreePages:
    """Free pages by extent: fills the lowest extents first and says which ones became empty. Host only."""

    def __init__(self, pages: int, pages_per_extent: int) -> None:
        self._per_extent = pages_per_extent
        self._free: dict[int, list[int]] = {}
        for page in range(pages - 1, 0, -1):  # page 0 is the dummy and never leaves
            self._free.setdefault(page // pages_per_extent, []).append(page)
        self._open = sorted(self._free)  # a heap; an entry without free pages is stale and skipped
        self.count = pages - 1

    def take(self, count: int) -> list[int] | None:
        if count > self.count:
            return None
        taken: list[int] = []
        while len(taken) < count:
            pages = self._free[self._open[0]]
            if not pages:
                heapq.heappop(self._open)
                continue
            part = min(count - len(taken), len(pages))
            taken += pages[-part:]
            del pages[-part:]
        self.count -= count
        return taken

    def give(self, pages: list[int]) -> list[int]:
        """Take pages back; returns the extents that hold no page any more."""
        emptied = []
        for page in pages:
            extent = page // self._per_extent
            free = self._free[extent]
            if not free:
                heapq.heappush(self._open, extent)
            free.append(page)
            if len(free) == self._per_extent and extent != 0:
                emptied.append(extent)
        self.count += len(pages)
        return emptied

    def is_empty(self, extent: int) -> bool:
        return len(self._free[extent]) == self._per_extent

    def withdraw(self, extent: int) -> None:
        """An empty extent is unmapped: its pages are no longer to be had."""
        self._free[extent] = []
        self.count -= self._per_extent

    def restore(self, extent: int) -> None:
        """The extent's addresses are mapped again."""
        self._free[extent] = list(range((extent + 1) * self._per_extent - 1, extent * self._per_extent - 1, -1))
        heapq.heappush(self._open, extent)
        self.count += self._per_extent


class HostPages:
    """The allocator: SGLang's interface (lengths on the host are known there), no device value read.

    Ids of the next pages are chosen and uploaded many at a time. A step then takes a slice of what is there already, as
    SGLang does; which ids those are the host knows, since it put them in that order.
    """

    AHEAD = 1024  # ids in one upload

    def __init__(
        self, pages: int, page_size: int, pages_per_extent: int, device: str, kernels: tuple[Any, Any]
    ) -> None:
        self._page_size = page_size
        self._device = device
        self._decode_kernel, self._extend_kernel = kernels
        self.pages = FreePages(pages, pages_per_extent)
        self._ring = PinnedRing(1 << 15)
        self._arriving: deque[tuple[torch.Tensor, int, torch.cuda.Event, torch.cuda.Event]] = deque()
        # By extent, oldest first. One that is filled and emptied again waits anew: the older event says nothing of it.
        self._quarantine: dict[int, torch.cuda.Event] = {}
        self._last_launch = torch.cuda.Event()
        self._group: list[torch.Tensor] | None = None
        self._ahead_ids: list[int] = []
        self._ahead_there = torch.empty(0, dtype=torch.int64, device=device)
        self._at = 0

    def launched(self, done: torch.cuda.Event) -> None:
        """The forward stream was given a batch; `done` is recorded behind it."""
        self._last_launch = done

    def available(self) -> int:
        """Pages that can be had now."""
        return self.pages.count + len(self._ahead_ids) - self._at

    def _next(self, count: int) -> torch.Tensor | None:
        """The next `count` ids, on the device; None when there are too few."""
        if len(self._ahead_ids) - self._at < count:
            self._top_up(count)
            if len(self._ahead_ids) < count:
                return None
        self._at += count
        return self._ahead_there[self._at - count :]

    def _top_up(self, count: int) -> None:
        """Choose and upload ids until `count` are ahead, or as many as there are."""
        left = len(self._ahead_ids) - self._at
        more = self.pages.take(min(self.pages.count, max(count, self.AHEAD) - left)) or []
        self._ahead_ids = self._ahead_ids[self._at :] + more
        self._at = 0
        buffer = self._ring.take()
        total = len(self._ahead_ids)
        buffer.numpy()[:total] = self._ahead_ids
        self._ahead_there = torch.empty(total, dtype=torch.int64, device=self._device)
        self._ahead_there.copy_(buffer[:total], non_blocking=True)
        self._ring.give_after_copy(buffer)

    def alloc_decode(
        self, seq_lens: torch.Tensor, seq_lens_cpu: torch.Tensor, last_loc: torch.Tensor
    ) -> torch.Tensor | None:
        """One slot for each request; `seq_lens` counts the new token. None when short of pages."""
        batch = len(seq_lens)
        pages = self._next(int(np.count_nonzero(seq_lens_cpu.numpy() % self._page_size == 1)))
        if pages is None:
            return None
        out = torch.empty(batch, dtype=torch.int64, device=self._device)
        self._decode_kernel[(batch,)](seq_lens, last_loc, pages, out, _power_of_two(batch), self._page_size)
        return out

    def alloc_extend(
        self,
        prefix_lens: torch.Tensor,
        prefix_lens_cpu: torch.Tensor,
        seq_lens: torch.Tensor,
        seq_lens_cpu: torch.Tensor,
        last_loc: torch.Tensor,
        extend_num_tokens: int,
    ) -> torch.Tensor | None:
        """Slots for the new tokens of prefills. None when short of pages."""
        size = self._page_size
        before, after = prefix_lens_cpu.numpy(), seq_lens_cpu.numpy()
        pages = self._next(int(((after + size - 1) // size - (before + size - 1) // size).sum()))
        if pages is None:
            return None
        out = torch.empty(extend_num_tokens, dtype=torch.int64, device=self._device)
        batch = len(seq_lens)
        self._extend_kernel[(batch,)](prefix_lens, seq_lens, last_loc, pages, out, _power_of_two(batch), size)
        return out

    def free_group_begin(self) -> None:
        self._group = []

    def free_group_end(self) -> None:
        group, self._group = self._group, None
        if group:
            self.free(torch.cat(group))

    def free(self, slots: torch.Tensor) -> None:
        """Slots of any number of requests; their ids set out for the host behind what the current stream holds."""
        if self._group is not None:
            self._group.append(slots)
            return
        for part in slots.split(1 << 15):
            buffer = self._ring.take()
            count = len(part)
            buffer[:count].copy_(part, non_blocking=True)
            arrived = self._ring.event()
            arrived.record()
            self._arriving.append((buffer, count, arrived, self._last_launch))

    def poll(self) -> list[int]:
        """Book the ids that arrived; returns the extents that may be unmapped now: empty, and past their quarantine.

        Also tops up the ids ahead, so that no allocation has to.
        """
        while self._arriving and self._arriving[0][2].query():
            buffer, count, arrived, quarantine = self._arriving.popleft()
            slots = buffer.numpy()[:count]
            # Whatever SGLang frees begins at a page, so a page is known by its first slot and needs no sorting.
            pages = (slots[slots % self._page_size == 0] // self._page_size).tolist()
            self._ring.give(buffer)
            self._ring.done_with(arrived)
            for extent in self.pages.give(pages):
                self._quarantine.pop(extent, None)
                self._quarantine[extent] = quarantine
        if len(self._ahead_ids) - self._at < self.AHEAD // 2 and self.pages.count:
            self._top_up(self.AHEAD)
        ready = []
        for extent, event in list(self._quarantine.items()):
            if not event.query():
                break
            del self._quarantine[extent]
            if self.pages.is_empty(extent):
                ready.append(extent)
        return ready


def _power_of_two(n: int) -> int:
    return 1 << max(0, n - 1).bit_length()
