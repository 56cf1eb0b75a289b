"""What this engine does between two steps of SGLang's event loop. The hooks call it where SGLang reads its sockets,
where it sleeps when idle, before it forms a prefill batch, before it decodes, and as steps begin and end."""

from __future__ import annotations

import time
from collections.abc import Iterator
from math import inf
from typing import TYPE_CHECKING, Any

from gpu_scheduler.engines.sglang.base import stalls
from gpu_scheduler.engines.sglang.base.errors import LeaveLoop
from gpu_scheduler.engines.sglang.base.states import EngineState
from gpu_scheduler.engines.sglang.kv.compaction import compact, is_scattered
from gpu_scheduler.engines.sglang.model.stats import EVERY_S, engine_stats
from gpu_scheduler.engines.sglang.step.commands import Commands
from gpu_scheduler.engines.sglang.step.pacer import Pacer
from gpu_scheduler.engines.sglang.step.reclaim import Reclaim
from gpu_scheduler.engines.sglang.step.retraction import retract_chunked, retract_one
from gpu_scheduler.engines.sharing.throttle import FREE, PrefillThrottle
from gpu_scheduler.engines.sharing.tpot_slack import Stream
from protos import engine_pb2
from services.telemetry import log

if TYPE_CHECKING:
    from gpu_scheduler.engines.sglang.model.instance import Instance

_log = log.get(__name__)
_TURN_LOOK_S = 0.001
"""How often a prefill that waits for its turn looks at the word: it has no event, and a message would wait for a
step."""
_IDLE_LOOKS_S = (0.05, 0.2, 1.5)
"""The last one is after the driver has shrunk the reserve of an engine that does not grow any more."""
_MEMORY_LOOK_S = 0.02
"""How often a request that waits for memory asks again without an event."""
_PROBE_PATIENCE_S = 5.0


class StepLoop:
    """The instance's side of SGLang's loop. Single-threaded."""

    def __init__(self, instance: Instance) -> None:
        self._instance = instance
        self._ranks = instance.ranks
        self.pacer = Pacer()
        self._reclaim = Reclaim(instance, self.changed)
        self._commands = Commands(instance, self.changed)
        self._gave_way = False
        """In the last step: it did nothing, because another engine went first."""
        self._wanting = False
        """Its decodes are to go before those of others, as it told them last."""
        self._prefill_prompts = 0
        """In the prefill step that was begun last."""
        self._prefill_next = False
        """As soon as the results are out that are looked at now."""
        self._stalled_since: float | None = None
        self._started_over_for: str | None = None
        """The request, by SGLang's name: once for each."""
        self._stats_at = 0.0
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
                # First tokens may have come: they count from now on.
                self._decodes(instance.scheduler.running_batch, self._ranks.now())
                began = time.monotonic()
                self._wait_for_way()
                instance.counters.stood_still_s += time.monotonic() - began
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
        self._reclaim.attend(now)
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

    def _pace(self) -> PrefillThrottle | None:
        """The probe takes no turns: it is short, and nobody gives turns to an engine that is not active."""
        return FREE if self._instance.state is EngineState.PROVING else self._ranks.pace()

    def _rest(self, pace: PrefillThrottle | None, now: float) -> float:
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
        elif now - self._stalled_since > self._patience_s():
            self._park()
            self._stalled_since = None
        return True

    def _patience_s(self) -> float:
        """How long what lacks memory waits for it. A probe has nowhere else to go, and with it goes a model that was
        just built: it waits for what its limit allows, which others may have yet."""
        instance = self._instance
        own = instance.options.park_after_ms / 1e3
        proves = instance.probe is not None and instance.probe.proves
        return max(own, _PROBE_PATIENCE_S) if proves and instance.kv.memory.headroom() > 0 else own

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
        entry = self._instance.request_table.by_rid(request.rid)
        if entry is not None:
            self._instance.request_table.close(entry)
            self._instance.channel.send(parked=engine_pb2.Parked(request_id=entry.request_id))

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
        if self._reclaim.over_limit():
            if running.is_empty():
                self._reclaim.shrink(retract_chunked, scheduler)
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
        self._reclaim.shrink(retract_one, self._instance.scheduler, batch)

    def gives_way(self, batch: Any) -> bool:
        """Whether the decode step of this batch, which is due, waits: another engine goes first. Never that of a
        probe. Requests that are over, or told to end, are not kept for it."""
        if not self._decodes(batch, self._ranks.now()):
            return False
        self._gave_way = self._instance.state is not EngineState.PROVING and self._ranks.gives_way()
        if self._gave_way:
            self.pacer.stood_still()
        return self._gave_way

    def _decodes(self, batch: Any, now: float) -> int:
        """Looks at what the requests of this batch have had so far. How many of them go on."""
        requests = _going_on(batch)
        if self.pacer.is_blind(now):
            self._instance.decodes_within(self.pacer.at_most_s)
            step = self._ranks.decode_step(self.pacer.step_alone(self._instance.decode_step_s, now))
            self.pacer.decoding(self._streams(requests, now), now, step)
        self._tell_want(len(requests), now)
        return len(requests)

    def _streams(self, requests: list[Any], now: float) -> Iterator[Stream]:
        """Of those that have their first token. Its time is when it is seen here, which is right behind the step."""
        for request in requests:
            tokens = len(request.output_ids)
            entry = self._instance.request_table.by_rid(request.rid) if tokens else None
            if entry is not None:
                if entry.first_at is None:
                    entry.first_at = now
                yield Stream(entry.first_at, tokens - 1)

    def _tell_want(self, requests: int, now: float) -> None:
        """What other engines are to know of its decodes, which are of so many requests."""
        if self._instance.state is EngineState.PROVING:
            requests = 0
        need = self.pacer.need if requests else None
        self._wanting = need is not None and self.pacer.wants(now)
        self._ranks.decodes(requests, need, self._wanting)

    # --- steps

    def results_first(self, copied: Any) -> bool:
        """Another prefill step is about to be launched; `copied`: the event of the last one's results. Whether these
        are there. Ranks would not see that alike."""
        self._prefill_next = self._ranks.size == 1 and copied is not None and bool(copied.query())
        return self._prefill_next

    def decode_begins(self) -> None:
        """A decode step goes to the device."""
        if self._instance.state is EngineState.PROVING:
            self.pacer.forget_steps()
        counters = self._instance.counters
        counters.decode_steps += 1
        counters.urgent_steps += self._wanting
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

    # --- where SGLang sleeps

    def sleep(self) -> None:
        """SGLang is idle: does what had to wait for that, gives back what nobody uses, then waits for an event."""
        instance = self._instance
        self._ranks.decodes(0, None, False)
        if self._commands.when_idle():
            return
        kv = instance.kv
        expected_s = instance.kv_transfer.expected_s(time.monotonic())
        if self._expected and not expected_s:
            self.changed()
        self._expected = expected_s > 0
        if instance.state is EngineState.ACTIVE and not expected_s:
            kv.settle()
            kv.give_up_empties()
            if not self._told_idle and is_scattered(kv):
                instance.counters.moved_tokens += compact(instance.scheduler.tree_cache, kv) * kv.page_size
                kv.give_up_empties()
        now = time.monotonic()
        if not self._told_idle:
            self._reclaim.report()
            self._looks = list(_IDLE_LOOKS_S)
        if not self._told_idle or kv.memory.mapped_bytes != self._told_mapped:
            self._send_stats(now)
            self._told_idle = True
        # The driver unmaps in its own time: what was told is looked at again, a few times.
        look = self._looks.pop(0) if self._looks else None
        due = self._commands.next_deadline_s(now)
        waits = [seconds for seconds in (look, due, expected_s or None) if seconds is not None]
        instance.channel.wait(min(waits) if waits else None, self._wake_fds())

    # --- telling

    def _tell(self, now: float) -> None:
        if now - self._stats_at >= EVERY_S and not self._told_idle:
            self._reclaim.report(if_due_at=now)
            self._send_stats(now)

    def _send_stats(self, now: float) -> None:
        instance = self._instance
        self._stats_at = now
        self._told_mapped = instance.kv.memory.mapped_bytes
        stats = engine_stats(
            instance.scheduler,
            instance.kv,
            instance.memory.limit_bytes,
            instance.counters,
            self.pacer.step.seconds,
        )
        instance.channel.send(stats=stats)

    def changed(self) -> None:
        """Something happened that the next statistics should tell."""
        self._told_idle = False


def _going_on(batch: Any) -> list[Any]:
    """Those requests of a batch that go on. What is over stays in it until the next decode step is formed, which may
    have to wait."""
    return [request for request in batch.reqs if not request.finished() and request.to_finish is None]
