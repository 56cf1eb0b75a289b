"""What this engine does between two steps of SGLang's event loop. The hooks call it where SGLang reads its sockets,
where it sleeps when idle, before it forms a prefill batch, before it decodes, and as steps begin and end."""

from __future__ import annotations

import time
from collections.abc import Iterator
from math import inf
from typing import TYPE_CHECKING, Any

from gpu_scheduler.engines.sglang import device, eviction, stalls
from gpu_scheduler.engines.sglang.commands import Commands
from gpu_scheduler.engines.sglang.compaction import compact, is_scattered, make_leave
from gpu_scheduler.engines.sglang.errors import LeaveLoop
from gpu_scheduler.engines.sglang.kv import DUMMY
from gpu_scheduler.engines.sglang.pacer import Pacer
from gpu_scheduler.engines.sglang.residency import State
from gpu_scheduler.engines.sglang.retraction import retract_chunked, retract_one
from gpu_scheduler.engines.sglang.stats import EVERY_S, engine_stats
from gpu_scheduler.policy.lead import Stream
from gpu_scheduler.policy.pace import FREE, Pace
from protos import engine_pb2
from services import log

if TYPE_CHECKING:
    from gpu_scheduler.engines.sglang.instance import Instance

_log = log.get(__name__)
_TURN_LOOK_S = 0.001
"""How often a prefill that waits for its turn looks at the word: it has no event, and a message would wait for a
step."""
_IDLE_LOOKS_S = (0.05, 0.2, 1.5)
"""The last one is after the driver has shrunk the reserve of an engine that does not grow any more."""
_MEMORY_LOOK_S = 0.02
"""How often a request that waits for memory asks again without an event."""
_EMPTIES_LOOK_S = 0.05
"""How often a running engine looks for extents that were emptied and lingered."""
_BUSY_S = 1.0
"""How long what is over the limit stays because others read or write KV here: a copy takes tenths of that."""
_SCATTERED_SHARE = 0.05
"""Of the time, at most, in which those that run stand still because others want what is cached between their pages."""
_REPORT_SHARE = 0.0025
"""Of the time, at most, for walks over the prefix cache that reports need."""


class Loop:
    """The instance's side of SGLang's loop. Single-threaded."""

    def __init__(self, instance: Instance) -> None:
        self._instance = instance
        self._ranks = instance.ranks
        self.pacer = Pacer()
        self._commands = Commands(instance, self)
        self._gave_way = False
        """In the last step: it did nothing, because another engine went first."""
        self._prefill_prompts = 0
        """In the prefill step that was begun last."""
        self._prefill_next = False
        """As soon as the results are out that are looked at now."""
        self._stalled_since: float | None = None
        self._started_over_for: str | None = None
        """The request, by SGLang's name: once for each."""
        self._stats_at = 0.0
        self._report_at = 0.0
        """When the next report is due, while requests run."""
        self._empties_at = 0.0
        self._busy_since: float | None = None
        """Since when an engine over its limit has waited for KV that is on its way."""
        self._scattered_at = 0.0
        """When prefixes between the pages of those that run may be given up again."""
        self._expected = False
        """Requests that come with their KV, when it went to sleep last."""
        self._told_idle = False
        self._told_mapped = 0
        self._looks: list[float] = []
        """When an idle engine looks whether its memory changed, in seconds, one after the other."""

    # --- where SGLang reads its sockets

    def pull(self) -> list[Any]:
        """What came, as SGLang's own requests. Waits only when the last step did nothing although something waits, and
        there is nothing to do about memory: what ranks agreed on holds until they receive again."""
        instance, channel = self._instance, self._instance.channel
        stalls.at_work()
        messages = channel.receive()
        self.pacer.look(self._ranks.now(), self._pace())
        gave_way, self._gave_way = self._gave_way, False
        if not messages and (gave_way or self._stalls()) and not self._memory_news():
            if gave_way:
                self._wait_for_way()
            else:
                self._wait_stalled()
            messages = channel.receive()
            self.pacer.look(self._ranks.now(), self._pace())  # the wait is no part of the step that begins now
        if channel.closed:
            raise LeaveLoop("the gpu_scheduler is gone")
        inputs: list[Any] = []
        for number, message in enumerate(messages, start=1):
            try:
                inputs += self._commands.take(message)
            except LeaveLoop:
                channel.unread(messages[number:])
                raise
        now = self._ranks.now()
        self._decodes(self._instance.scheduler.running_batch, now)
        inputs += self._commands.tick(now)
        self._probe(inputs)
        self._attend(now)
        self._tell(now)
        if messages or inputs:
            self._told_idle = False
            instance.admission.refused = False
        return inputs

    def _probe(self, inputs: list[Any]) -> None:
        instance = self._instance
        if instance.probe is not None:
            inputs += [instance.to_sglang(generate, generate.request_id) for generate in instance.probe.next_requests()]

    def _memory_news(self) -> bool:
        kv = self._instance.memory.kv
        return kv is not None and kv.woken

    def _wake_fds(self) -> list[int]:
        kv = self._instance.memory.kv
        return [] if kv is None else [kv.wake_fd]

    def _my_turn(self) -> bool:
        """Whether a prefill step may begin."""
        return self._rest(self._pace(), self._ranks.now()) == 0

    def _pace(self) -> Pace | None:
        """The probe takes no turns: it is short, and nobody gives turns to an engine that is not active."""
        return FREE if self._instance.state is State.PROVING else self._ranks.pace()

    def _rest(self, pace: Pace | None, now: float) -> float:
        """Seconds until a prefill step may begin, as far as can be said now."""
        return inf if pace is None else self.pacer.rest(pace.pause_ratio, now)

    # --- requests that cannot start

    def _stalls(self) -> bool:
        """Whether the last step did nothing although requests wait: for memory, the turn, or the end of a pause."""
        scheduler = self._instance.scheduler
        waits = bool(scheduler.waiting_queue) or scheduler.chunked_req is not None
        if scheduler.last_batch is not None or not waits or not scheduler.running_batch.is_empty():
            self._stalled_since = None
            return False
        now = self._ranks.now()
        if self._stalled_since is None or not self._my_turn():
            self._stalled_since = now
        elif now - self._stalled_since > self._instance.options.park_after_ms / 1e3:
            self._park()
            self._stalled_since = None
        return True

    def _wait_stalled(self) -> None:
        """Until an event, the turn, the end of the pause, or the time to ask for memory again."""
        channel, fds = self._instance.channel, self._wake_fds()
        if self._my_turn():
            channel.wait(_MEMORY_LOOK_S, fds)
            return
        while (rest := self._rest(self._ranks.pace_now(), time.monotonic())) > 0:
            if channel.wait(min(rest, _TURN_LOOK_S), fds):
                return
            if self._commands.next_deadline_s(time.monotonic()) == 0:
                return

    def _wait_for_way(self) -> None:
        """Until no step of another engine goes first any more, an event, or time has come for a prompt of its own."""
        held = self._prefill_held()
        requests = len(_going_on(self._instance.scheduler.running_batch))
        self._tell_want(requests, time.monotonic())
        while requests and self._ranks.gives_way_now():
            if self._instance.channel.wait(_TURN_LOOK_S, self._wake_fds()):
                return
            self._tell_want(requests, time.monotonic())  # what stands still falls behind
            if (held and not self._prefill_held()) or self._commands.next_deadline_s(time.monotonic()) == 0:
                return

    def _prefill_held(self) -> bool:
        """Whether a prompt waits for the turn, for the end of a pause, or for decode steps that come first."""
        scheduler, now = self._instance.scheduler, time.monotonic()
        waits = bool(scheduler.waiting_queue) or scheduler.chunked_req is not None
        return waits and (self._rest(self._ranks.pace_now(), now) > 0 or self.pacer.holds_at(now))

    def _park(self) -> None:
        """Nothing runs, and what waits first cannot be fitted: back into the shared queue with it, unless it fits into
        what is here once that lies in a row. Pages that lie over the edges of extents lose something at each end of a
        row of these: where there is only the floor, perhaps too much."""
        scheduler = self._instance.scheduler
        first = scheduler.waiting_queue[0].rid if scheduler.waiting_queue else None
        if scheduler.chunked_req is None and first != self._started_over_for:
            self._started_over_for = first
            if self._instance.admission.start_over(scheduler.tree_cache):
                return
        retract_chunked(scheduler)
        if scheduler.waiting_queue:
            self.parked(scheduler.waiting_queue.pop(0))

    def parked(self, request: Any) -> None:
        """SGLang has let go of a request that found no memory: the shared queue gets it back."""
        probe = self._instance.probe
        _log.debug("no memory for a request", request=request.rid, prompt_tokens=len(request.origin_input_ids))
        if probe is not None and probe.has(request.rid):
            probe.stop(f"no KV memory for a pass of {len(request.origin_input_ids)} tokens under the present limit")
            return
        entry = self._instance.book.by_rid(request.rid)
        if entry is not None:
            self._instance.book.close(entry)
            self._instance.channel.send(parked=engine_pb2.Parked(request_id=entry.request_id))

    # --- memory

    def _attend(self, now: float) -> None:
        """Acts on limits, reclaims and growth that arrived."""
        instance = self._instance
        memory, kv = instance.memory.kv, instance.kv
        if memory is None:
            return
        kv.poll(self._ranks.agreed.arrived if self._ranks.size > 1 else None)
        kv.tell_cached(instance.scheduler.tree_cache.evictable_size())
        if memory.woken:
            instance.scheduler.running_batch.batch_is_full = False
            wanted = memory.take_reclaims()
            if not wanted:  # that others want something is no sign of more; a new limit or what came late may be
                kv.may_wait_again()
            else:
                kv.settle()
                self._give_scattered(wanted - self._give_up(wanted), now)
                self._report()
                memory.reclaimed()
                self.changed()
        if memory.overage_bytes() > 0:
            kv.settle()
            self._give_up(memory.overage_bytes())
            self._report()
            self.changed()
            return
        instance.admission.ahead(instance.scheduler.tree_cache, now)
        kept = instance.admission.evicts(now) or instance.moving.expected_s(now) > 0
        if now >= self._empties_at and not kept and not self._idle():
            self._empties_at = now + _EMPTIES_LOOK_S
            kv.give_up_empties(older_than_s=instance.options.linger_ms / 1e3)

    def _give_up(self, nbytes: int) -> int:
        """What is empty leaves, and of cached prefixes what is needed for `nbytes`; how many bytes did. All at once:
        unmapping on the lease's thread would slow the walk over the tree."""
        instance = self._instance
        memory, kv = instance.memory.kv, instance.kv
        assert memory is not None
        kv.hold_tied()
        wanted = -(-nbytes // memory.extent_bytes) - kv.leaving()
        if wanted > 0:
            begun = time.monotonic()
            evicted = eviction.empty_extents(instance.scheduler.tree_cache, kv, wanted)
            instance.counters.evicted_tokens += evicted
            instance.counters.evicting_s += time.monotonic() - begun
        return kv.give_up_empties() * memory.extent_bytes

    def _give_scattered(self, nbytes: int, now: float) -> None:
        """So much more is wanted, and of what is cached no extent is without pages of those that run: what stays moves
        together, if it all has a place; where some is lost at the edges of extents, more of what is cached goes. A step
        of those that run waits for that, so not all the time."""
        instance, kv, tree = self._instance, self._instance.kv, self._instance.scheduler.tree_cache
        assert instance.memory.kv is not None
        extents, lost = nbytes // instance.memory.kv.extent_bytes, 0
        if extents <= 0 or now < self._scattered_at or not self._may_move():
            return
        begun = time.monotonic()
        while lost <= extents and kv.leaving() < extents and kv.beyond(extents + lost) <= tree.evictable_size():
            device.wait(instance.device)
            kv.settle()
            kv.hold_tied()
            instance.admission.make_fit(tree, extents + lost)
            self._move_together(extents)
            lost = 2 * lost + 1
        kv.give_up_empties()
        spent_s = time.monotonic() - begun
        instance.counters.evicting_s += spent_s
        self._scattered_at = now + spent_s / _SCATTERED_SHARE

    def _report(self) -> None:
        instance = self._instance
        memory, tree = instance.memory.kv, instance.scheduler.tree_cache
        if memory is not None:
            begun = time.monotonic()
            used = instance.kv.bytes_of(instance.kv.used - tree.evictable_size())
            memory.usage(used, eviction.cached_by_age(tree, instance.kv, begun))
            self._report_at = begun + (time.monotonic() - begun) / _REPORT_SHARE

    def _over_limit(self) -> bool:
        memory = self._instance.memory.kv
        return memory is not None and memory.overage_bytes() > 0

    # --- before SGLang forms a prefill batch

    def may_prefill(self, running: Any) -> bool:
        """False when it is another engine's turn or a pause, when what is `running` has to decode first, when memory
        has to leave first, or when the next chunk of a prompt has none."""
        instance, scheduler = self._instance, self._instance.scheduler
        if not self._my_turn():
            return False
        # Nothing is held for decodes that stand still themselves.
        if self.pacer.holds and _going_on(running) and not self._ranks.gives_way():
            return False
        if self._over_limit():
            if running.is_empty():
                self._shrink(retract_chunked, scheduler)
            return False
        request = scheduler.chunked_req
        if request is not None:
            left = len(request.full_untruncated_fill_ids) - len(request.prefix_indices)
            if not instance.admission.fits(scheduler.tree_cache, min(left, self.chunk_tokens()) + 1):
                return False
        # Memory may have come since SGLang found none.
        if not instance.admission.refused or scheduler.last_batch is None:
            scheduler.running_batch.batch_is_full = False
        return True

    def chunk_tokens(self) -> int:
        """The most prompt tokens of the next prefill step: what the pace allows, at least what SGLang can align a chunk
        to."""
        scheduler, pace = self._instance.scheduler, self._pace()
        whole: int = scheduler.chunked_prefill_size
        if pace is None or not pace.chunk_tokens or not whole:  # None: its options say that prompts are not cut
            return whole
        unit = scheduler.truncation_align_size or scheduler.page_size
        return min(whole, max(unit, pace.chunk_tokens // unit * unit))

    # --- before SGLang decodes

    def before_decode(self, batch: Any) -> None:
        """Over the limit with nothing left to evict: running requests leave, one by one."""
        self._shrink(retract_one, self._instance.scheduler, batch)

    def gives_way(self, batch: Any) -> bool:
        """Whether the decode step of this batch, which is due, waits: another engine goes first. Never that of a
        probe. Requests that are over, or told to end, are not kept for it."""
        if not self._decodes(batch, self._ranks.now()):
            return False
        self._gave_way = self._instance.state is not State.PROVING and self._ranks.gives_way()
        if self._gave_way:
            self.pacer.stood_still()
        return self._gave_way

    def _decodes(self, batch: Any, now: float) -> int:
        """Looks at what the requests of this batch have had so far. How many of them go on."""
        requests = _going_on(batch)
        self.pacer.decoding(self._streams(requests, now), now, self._instance.decode_step_s)
        self._tell_want(len(requests), now)
        return len(requests)

    def _streams(self, requests: list[Any], now: float) -> Iterator[Stream]:
        """Of those that have their first token. Its time is when it is seen here, which is right behind the step."""
        for request in requests:
            tokens = len(request.output_ids)
            entry = self._instance.book.by_rid(request.rid) if tokens else None
            if entry is not None:
                if entry.first_at is None:
                    entry.first_at = now
                yield Stream(entry.first_at, tokens - 1)

    def _tell_want(self, requests: int, now: float) -> None:
        """What other engines are to know of its decodes, which are of so many requests."""
        if self._instance.state is State.PROVING:
            requests = 0
        need = self.pacer.need if requests else None
        self._ranks.decodes(requests, need, need is not None and self.pacer.wants(now))

    # --- steps

    def results_first(self, copied: Any) -> bool:
        """Another prefill step is about to be launched; `copied`: the event of the last one's results. Whether these
        are there. Ranks would not see that alike."""
        self._prefill_next = self._ranks.size == 1 and copied is not None and bool(copied.query())
        return self._prefill_next

    def decode_begins(self) -> None:
        """A decode step goes to the device."""
        self.pacer.decodes(self._ranks.alone())
        self._ranks.stepped()

    def decode_ended(self) -> None:
        """Its results are here."""
        self.pacer.decoded()

    def prefill_begins(self, prompts: int) -> None:
        """A prefill step of so many prompts goes to the device."""
        self._prefill_next = False
        self._prefill_prompts = prompts
        self.pacer.began()
        self._ranks.stepped()
        self._claim()

    def prefill_ended(self) -> None:
        """Its results are here."""
        self.pacer.ended()
        if self.pacer.under_way or self._prefill_next:
            self._claim()  # for the one behind it, which begins now
        else:
            self._ranks.release()

    def _claim(self) -> None:
        """Who waits behind the step, and not for a decode to end, has as much of what is spared as who is in it."""
        scheduler, prompts = self._instance.scheduler, self._prefill_prompts
        room: int = scheduler.get_num_allocatable_reqs(len(scheduler.running_batch.reqs) + prompts)
        self._ranks.claim(prompts + min(len(scheduler.waiting_queue), max(0, room)))

    def _shrink(self, retract: Any, *arguments: Any) -> None:
        """What is over the limit leaves, by way of `retract`, which stops a request, and says whether there was one.
        Prefixes go, then requests, as far as there is no place for them; what stays moves together. How much is lost
        where pages lie over the edges of extents is known when they lie there: then more goes."""
        instance = self._instance
        memory, kv, counters = instance.memory.kv, instance.kv, instance.counters
        if memory is None or (at_first := memory.overage_bytes()) <= 0 or self._moves_later():
            return
        begun, before = time.monotonic(), counters.retractions
        lost, exhausted, moves = 0, False, self._may_move()

        def stop_one() -> bool:
            stopped = bool(retract(*arguments))
            counters.retractions += stopped
            kv.settle()
            return stopped

        while (over := memory.overage_bytes()) > 0 and not exhausted:
            device.wait(instance.device)  # what it is at could not move
            kv.settle()
            kv.hold_tied()
            extents = -(-over // memory.extent_bytes)
            instance.admission.make_fit(instance.scheduler.tree_cache, extents + lost)
            if moves:
                while kv.beyond(extents + lost) > 0 and not exhausted:
                    exhausted = not stop_one()
                    instance.admission.make_fit(instance.scheduler.tree_cache, extents + lost)  # its prompt is cached
                self._move_together(extents)
            else:
                exhausted = not stop_one()
            self._give_up(over)
            if moves and memory.overage_bytes() >= over:
                lost = 2 * lost + 1
        left, retractions = at_first - memory.overage_bytes(), counters.retractions - before
        if left > 0 or retractions:
            ms = round(1e3 * (time.monotonic() - begun), 1)
            _log.info("memory left", bytes=left, retractions=retractions, ms=ms)

    def _moves_later(self) -> bool:
        """Others go by where KV is, for a moment: by place nearly all would have to go."""
        if not self._instance.moving.busy:
            self._busy_since = None
            return False
        now = time.monotonic()
        self._busy_since = self._busy_since or now
        return now - self._busy_since < _BUSY_S

    def _may_move(self) -> bool:
        """Nobody else goes by where things are."""
        return self._ranks.size == 1 and not self._instance.moving.busy

    def _move_together(self, extents: int) -> None:
        """So that so many leave. Only what `_may_move`, with the device at rest."""
        instance, kv = self._instance, self._instance.kv
        more = extents - kv.leaving()
        if more <= 0:
            return
        fixed = [DUMMY] if kv.has_dummy else []
        instance.counters.moved_tokens += make_leave(instance.scheduler, kv, more, fixed) * kv.page_size
        device.wait(instance.device)

    # --- where SGLang sleeps

    def sleep(self) -> None:
        """SGLang is idle: does what had to wait for that, gives back what nobody uses, then waits for an event."""
        instance = self._instance
        self._ranks.decodes(0, None, False)
        if self._commands.when_idle():
            return
        kv = instance.kv
        expected_s = instance.moving.expected_s(time.monotonic())
        if self._expected and not expected_s:
            self.changed()
        self._expected = expected_s > 0
        if instance.state is State.ACTIVE and not expected_s:
            kv.settle()
            kv.give_up_empties()
            if not self._told_idle and is_scattered(kv):
                instance.counters.moved_tokens += compact(instance.scheduler.tree_cache, kv) * kv.page_size
                kv.give_up_empties()
        now = time.monotonic()
        if not self._told_idle:
            self._report()
            self._looks = list(_IDLE_LOOKS_S)
        if not self._told_idle or kv.memory.mapped_bytes != self._told_mapped:
            self._send_stats(now)
            self._told_idle = True
        # The driver unmaps in its own time: what was told is looked at again, a few times.
        look = self._looks.pop(0) if self._looks else None
        due = self._commands.next_deadline_s(now)
        waits = [seconds for seconds in (look, due, expected_s or None) if seconds is not None]
        instance.channel.wait(min(waits) if waits else None, self._wake_fds())

    def _idle(self) -> bool:
        return bool(self._instance.scheduler.is_fully_idle())

    # --- telling

    def _tell(self, now: float) -> None:
        if now - self._stats_at >= EVERY_S and not self._told_idle:
            if now >= self._report_at:
                self._report()
            self._send_stats(now)

    def _send_stats(self, now: float) -> None:
        instance = self._instance
        self._stats_at = now
        self._told_mapped = instance.kv.memory.mapped_bytes
        stats = engine_stats(instance.scheduler, instance.kv, instance.memory.limit_bytes, instance.counters)
        instance.channel.send(stats=stats)

    def changed(self) -> None:
        """Something happened that the next statistics should tell."""
        self._told_idle = False


def _going_on(batch: Any) -> list[Any]:
    """Those requests of a batch that go on. What is over stays in it until the next decode step is formed, which may
    have to wait."""
    return [request for request in batch.reqs if not request.finished() and request.to_finish is None]
