"""The memory of a group, decided by balloond's policy (`balloond/policy/device.py`), whose every decision is carried
out here at once, or when the cost model says.

A group's models are spread over all of its devices, in equal parts, so all devices are alike: one stands for each of
them, and bytes are of one device.

An engine's lease has the model's name. Memory that it holds and runs nothing on is reported to the policy as cached
prefixes, last used when its last request ended: as on a real engine it stays until another model wants it.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import count
from typing import Protocol

from balloond.policy.claims import (
    AskBack,
    ClaimPatience,
    Decision,
    Freed,
    Grant,
    LimitChanged,
    Note,
    RefuseClaim,
    RoomAnswer,
    UsageReport,
    WantedExtents,
)
from balloond.policy.device import DevicePolicy
from balloond.policy.ledger import Booking
from gpu_scheduler.policy.memory.holdings import DeviceMemory, Holding
from gpu_scheduler.policy.queue.decisions import RoomTerms
from sim.clock import Clock, Timer
from sim.engines.cost import GpuModel

DEVICE = "each"
Answer = Callable[[int], None]
"""Callback with the result of making room: the bytes that are short."""


class SimulatedHolder(Protocol):
    """An engine, as its memory sees it. Bytes are on each device."""

    name: str
    used_bytes: int
    """Bytes of KV of requests that run."""
    last_use: float

    def grown(self, came: bool) -> None:
        """Memory that the engine waited for came, or will not come."""

    def limit_fell(self) -> None:
        """The engine may hold more than its limit now."""


class SimulatedMemory:
    """Leases, bookings and rooms of one group."""

    def __init__(self, clock: Clock, hardware: GpuModel, capacity_bytes: int) -> None:
        self._clock = clock
        self._hardware = hardware
        self.device = DevicePolicy(DEVICE, capacity_bytes, 2 << 20, count(1), count(1), ClaimPatience())
        self._holders: dict[str, SimulatedHolder] = {}
        self._extents: dict[str, list[int]] = {}
        """Lease -> its extents of KV, those granted last at the end."""
        self._weights: dict[str, list[int]] = {}
        self._weights_bytes: dict[str, int] = {}
        self._growing: dict[str, int] = {}
        """Lease -> the request by which it waits for more memory."""
        self._requests = count(1)
        self._rooms: dict[int, Answer] = {}
        self._timer: Timer | None = None
        self.reclaimed_bytes = 0
        """Bytes that were ever taken from one model for another."""
        self.fixed_bytes = 0
        """Bytes that are booked and not elastic."""

    # --- bookings and leases

    def book(self, model: str, quota: int, weights: int, floor: int) -> None:
        """Books a model's bytes. Raises services.errors.Refused with the arithmetic."""
        self._carry_out(self.device.book(self._clock.now, model, Booking(quota, weights, floor)))
        self._count_fixed()

    def unbook(self, model: str) -> None:
        self._carry_out(self.device.unbook(self._clock.now, model))
        self._count_fixed()

    def _count_fixed(self) -> None:
        self.fixed_bytes = sum(booking.quota + booking.weights for booking in self.device.ledger.bookings.values())

    def open(self, holder: SimulatedHolder) -> None:
        """Opens the holder's lease; its model has to be booked."""
        self.device.open(holder.name, holder.name, holder.name)
        self._holders[holder.name] = holder
        self._extents[holder.name], self._weights[holder.name] = [], []
        self._weights_bytes[holder.name] = 0

    def close(self, model: str) -> None:
        """Ends the lease, with all that it holds."""
        for known in (self._holders, self._extents, self._weights, self._weights_bytes, self._growing):
            known.pop(model, None)
        self._carry_out(self.device.end(self._clock.now, model))

    def limit(self, model: str, nbytes: int) -> None:
        """Limits a model's KV, until the limit is set again."""
        _, decisions = self.device.set_limit(self._clock.now, model, nbytes, 0, 0)
        self._carry_out(decisions)

    # --- state

    def held(self, model: str) -> int:
        """Bytes of KV that the model holds."""
        return len(self._extents[model]) * self._hardware.kv_extent_bytes

    def weights(self, model: str) -> int:
        return self._weights_bytes[model]

    def for_admission(self) -> DeviceMemory:
        """The memory as the group's gpu_scheduler hears of it."""
        ledger, limits = self.device.ledger, self.device.limits
        return DeviceMemory(
            device=DEVICE,
            capacity=ledger.capacity,
            free=ledger.free,
            holdings=[
                Holding(name, held := self.held(name), used := min(held, holder.used_bytes), held - used)
                for name, holder in self._holders.items()
            ],
            limits={model: limits.bytes_of(model) for model in self._holders},
            floors={model: booking.floor for model, booking in ledger.bookings.items()},
        )

    def check(self) -> None:
        """Raises AssertionError if a byte is missing, or an engine runs on more than it holds."""
        self.device.ledger.check()
        for name, holder in self._holders.items():
            kv, weights = self.device.ledger.kv_of(name), self.device.ledger.weights_of(name)
            assert (kv, weights) == (self.held(name), self.weights(name)), f"{name}: {kv} + {weights} in the ledger"
            assert 0 <= holder.used_bytes <= kv, f"{name} runs on {holder.used_bytes} bytes and holds {kv}"

    # --- growing

    def grow(self, model: str, least: int, most: int) -> bool:
        """Requests KV. Returns whether at least `least` bytes came at once; if not, `grown` is called later, with them
        or without."""
        if model in self._growing:
            return False
        size = self._hardware.kv_extent_bytes
        before = len(self._extents[model])
        number = next(self._requests)
        self._growing[model] = number
        if self.device.ledger.free < most:
            self._tell()
        least_count = max(1, -(-least // size))
        self._carry_out(
            self.device.grow(
                self._clock.now,
                model,
                number,
                WantedExtents("kv", size, max(least_count, -(-most // size)), least_count),
            ),
            quiet=model,
        )
        return len(self._extents[model]) - before >= least_count

    def waits(self, model: str) -> bool:
        """Whether the model waits for memory that it requested."""
        return model in self._growing

    def fill(self, model: str, nbytes: int) -> None:
        """Takes weights' extents in the room that was made for them: as many large ones as they fill, and one for the
        rest. Raises AssertionError if the room is not there."""
        large, page = self._hardware.weights_extent_bytes, self.device.ledger.page_bytes
        number, rest = divmod(max(0, nbytes - self.weights(model)), large)
        for size, wanted in ((large, number), (-(-rest // page) * page, min(rest, 1))):
            if wanted:
                asked = WantedExtents("weights", size, wanted, wanted)
                self._carry_out(self.device.grow(self._clock.now, model, next(self._requests), asked))
        assert self.weights(model) >= nbytes, f"{model} lacks {nbytes - self.weights(model)} bytes of its room"

    # --- giving back

    def give_back(self, model: str, nbytes: int, reclaim_id: int = 0) -> None:
        """Gives back KV on which the model runs nothing, in whole extents, at most `nbytes` rounded up."""
        extents, size = self._extents[model], self._hardware.kv_extent_bytes
        idle = self.held(model) - self._holders[model].used_bytes
        number = max(0, min(-(-nbytes // size), idle // size))
        ids = extents[len(extents) - number :]
        del extents[len(extents) - number :]
        decisions = self.device.give_back(self._clock.now, model, ids) if ids else []
        if reclaim_id:
            report = self._report(model, reclaim_id, number * size)
            decisions += self.device.report(self._clock.now, model, report)
            self.reclaimed_bytes += number * size
        self._carry_out(decisions)

    def empty(self, model: str) -> None:
        """Gives back all weights and KV."""
        ids = [*self._extents[model], *self._weights[model]]
        self._extents[model], self._weights[model] = [], []
        self._weights_bytes[model] = 0
        self._carry_out(self.device.give_back(self._clock.now, model, ids))

    def over_limit(self, model: str) -> int:
        """Bytes that the model holds above its limit."""
        return max(0, self.held(model) - self.device.limits.bytes_of(model))

    # --- rooms

    def make_room(self, model: str, nbytes: int, answer: Answer, *, may_retract: bool, terms: RoomTerms) -> None:
        """Has room made; `answer` is called after this has returned."""
        self._tell()
        now = self._clock.now
        until = now + terms.timeout_s
        claim, decisions = self.device.make_room(now, model, nbytes, may_retract, terms.held_s, until)
        self._rooms[claim] = answer
        self._carry_out(decisions)

    def release_room(self, model: str) -> None:
        _, decisions = self.device.make_room(self._clock.now, model, 0, False, 0.0, self._clock.now)
        self._carry_out(decisions)

    # --- decisions

    def _report(self, model: str, reclaim_id: int = 0, returned: int = 0) -> UsageReport:
        holder, held = self._holders[model], self.held(model)
        used = min(held, holder.used_bytes)
        return UsageReport(
            at=self._clock.now,
            held=held,
            used=used,
            cached=((holder.last_use, held - used),) if held > used else (),
            reclaim_id=reclaim_id,
            returned=returned,
        )

    def _tell(self) -> None:
        """Reports what each engine holds. Engines report on every change; here it is done when it is going to
        matter."""
        for model in self._holders:
            self.device.reclaims.reported(model, self._report(model))

    def _carry_out(self, decisions: list[Decision], quiet: str = "") -> None:
        """Carries decisions out. `quiet`: the model that need not be told that it has grown."""
        for decision in decisions:
            match decision:
                case Grant(lease_id, request_id, extents):
                    own = self._extents if extents[0].kind == "kv" else self._weights
                    own[lease_id].extend(extent.id for extent in extents)
                    if own is self._weights:
                        self._weights_bytes[lease_id] += sum(extent.bytes for extent in extents)
                    self._answered(lease_id, request_id, quiet, came=True)
                case RefuseClaim(lease_id, request_id):
                    self._answered(lease_id, request_id, quiet, came=False)
                case AskBack(lease_id, reclaim_id, nbytes):
                    self._clock.after(self._reclaim_s(nbytes), self._reclaim, lease_id, nbytes, reclaim_id)
                case LimitChanged(model):
                    if model in self._holders and self.over_limit(model):
                        self._clock.after(0.0, self._limit_fell, model)
                case RoomAnswer(claim_id, _, short):
                    if claim_id in self._rooms:
                        self._clock.after(0.0, self._rooms.pop(claim_id), short)
                case Freed() | Note():
                    pass
                case _:
                    raise RuntimeError(f"unexpected decision {decision}")
        due = self.device.next_deadline()
        if self._timer is not None and self._timer.when != due:
            self._timer.cancel()
            self._timer = None
        if due is not None and self._timer is None:
            self._timer = self._clock.at(due, self._tick)

    def _answered(self, model: str, request_id: int, quiet: str, came: bool) -> None:
        if self._growing.get(model) == request_id:
            del self._growing[model]
            if model != quiet:
                self._clock.after(0.0, self._grown, model, came)

    def _grown(self, model: str, came: bool) -> None:
        if model in self._holders:
            self._holders[model].grown(came)

    def _reclaim_s(self, nbytes: int) -> float:
        return self._hardware.reclaim_base_s + nbytes / self._hardware.reclaim_bytes_per_s

    def _reclaim(self, model: str, nbytes: int, reclaim_id: int) -> None:
        if model in self._holders:
            self.give_back(model, nbytes, reclaim_id)

    def _limit_fell(self, model: str) -> None:
        holder = self._holders.get(model)
        if holder is not None and self.over_limit(model):
            holder.limit_fell()

    def _tick(self) -> None:
        self._timer = None
        self._carry_out(self.device.tick(self._clock.now))
