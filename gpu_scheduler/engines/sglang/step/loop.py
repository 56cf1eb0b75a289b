"""The engine's work between two steps of SGLang's event loop. The hooks call it where SGLang reads its sockets, where
it sleeps when idle, before it forms a prefill batch, before it decodes, and as steps begin and end."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from gpu_scheduler.engines.sglang.base import stalls
from gpu_scheduler.engines.sglang.base.errors import LeaveLoop
from gpu_scheduler.engines.sglang.base.states import EngineState
from gpu_scheduler.engines.sglang.kv.compaction import compact, is_scattered
from gpu_scheduler.engines.sglang.model.stats import EVERY_S, engine_stats
from gpu_scheduler.engines.sglang.step.arbiter import Arbiter
from gpu_scheduler.engines.sglang.step.commands import Commands
from gpu_scheduler.engines.sglang.step.reclaim import Reclaim
from gpu_scheduler.engines.sglang.step.retraction import retract_chunked, retract_one
from gpu_scheduler.engines.sharing.tpot_slack import Stream
from protos import engine_pb2
from services.telemetry import log

if TYPE_CHECKING:
    from gpu_scheduler.engines.sglang.model.lifecycle import Lifecycle
    from gpu_scheduler.engines.shared_board import BoardSeat
    from gpu_scheduler.engines.sharing.step_gate import StepWait

_log = log.get(__name__)
_BOARD_LOOK_S = 0.001
"""Seconds between two looks at the shared board by a step that waits: the board has no event, and a message would wait
for a step."""
_IDLE_LOOKS_S = (0.05, 0.2, 1.5)
"""Seconds of the waits after which an idle engine looks whether its memory has changed. The last one is after the
driver has shrunk the reserve of an engine that does not grow any more."""
_MEMORY_LOOK_S = 0.02
"""Seconds after which a request that waits for memory tries again without an event."""
_PROBE_PATIENCE_S = 5.0
"""Least seconds for which the probe waits for memory that the limit allows."""


class StepLoop:
    """The engine's side of SGLang's event loop. Single-threaded."""

    def __init__(self, lifecycle: Lifecycle, seat: BoardSeat) -> None:
        """`seat`: the engine's place on the board that it shares with its neighbours."""
        self._model = model = lifecycle.model
        self._ranks = model.ranks
        self._arbiter = Arbiter(self._ranks, seat, lambda: model.state is EngineState.PROVING)
        self._reclaim = Reclaim(model, self.changed)
        self._commands = Commands(lifecycle, self.changed)
        self._gave_way: StepWait | None = None
        """The wait for which the last step did nothing; None: it did not wait for another engine."""
        self._prefill_prompts = 0
        """Prompts in the prefill step that was begun last."""
        self._prefill_next = False
        """True if another prefill step begins as soon as the results that are looked at now are out."""
        self._stalled_since: float | None = None
        self._started_over_for: str | None = None
        """Name (rid) of the last waiting request that memory was started over for; that happens once for each."""
        self._stats_at = 0.0
        self._expected = False
        """Whether requests were expected to come with their KV, at the last sleep."""
        self._told_idle = False
        self._told_mapped = 0
        self._looks: list[float] = []
        """Seconds of the waits that are left before an idle engine looks at its memory again."""

    # --- where SGLang reads its sockets

    def pull(self) -> list[Any]:
        """The messages that have come, as SGLang's own requests. Waits only when the last step did nothing although
        requests wait, and there is nothing to do about memory: what ranks agreed on holds until they receive again.
        Raises LeaveLoop."""
        model, channel = self._model, self._model.channel
        stalls.at_work()
        messages = channel.receive()
        self._arbiter.look()
        gave_way, self._gave_way = self._gave_way, None
        if not messages and (gave_way or self._stalls()) and not self._memory_news():
            if gave_way:
                # First tokens may have come: they count from now on.
                self._decodes(model.scheduler.running_batch, self._ranks.now())
                began = time.monotonic()
                self._wait_for_way()
                waited_s = time.monotonic() - began
                model.counters.stood_still_s += waited_s
                _log.debug("decode steps waited", why=gave_way.why.value, ms=round(1e3 * waited_s, 1))
            else:
                self._wait_stalled()
            messages = channel.receive()
            self._arbiter.look()  # the wait is no part of the step that begins now
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
        self._decodes(self._model.scheduler.running_batch, now)
        inputs += self._commands.tick(now)
        self._probe(inputs)
        self._reclaim.attend(now)
        self._tell(now)
        if messages or inputs:
            self._told_idle = False
            model.provisioning.refused = False
        return inputs

    def _probe(self, inputs: list[Any]) -> None:
        """Adds the requests of the probe's next stage."""
        model = self._model
        if model.probe is not None:
            inputs += [model.to_sglang(generate, generate.request_id) for generate in model.probe.next_requests()]

    def _memory_news(self) -> bool:
        """Whether a limit, memory or a reclaim has come."""
        kv = self._model.memory.kv
        return kv is not None and kv.woken

    def _wake_fds(self) -> list[int]:
        kv = self._model.memory.kv
        return [] if kv is None else [kv.wake_fd]

    # --- requests that cannot start

    def _stalls(self) -> bool:
        """Whether the last step did nothing although requests wait: for memory, the turn, or the end of a pause. Parks
        a request that has waited too long for memory."""
        scheduler = self._model.scheduler
        waits = bool(scheduler.waiting_queue) or scheduler.chunked_req is not None
        if scheduler.last_batch is not None or not waits or not scheduler.running_batch.is_empty():
            self._stalled_since = None
            return False
        now = self._ranks.now()
        if self._stalled_since is None or self._arbiter.pause():
            self._stalled_since = now
        elif now - self._stalled_since > self._patience_s():
            self._park()
            self._stalled_since = None
        return True

    def _patience_s(self) -> float:
        """Seconds for which a request that lacks memory waits for it. A probe has no other engine to go to, and if it
        fails the model that was just built leaves: it waits for memory that its limit allows and that other leases may
        still hold."""
        model = self._model
        own = model.options.park_after_ms / 1e3
        proves = model.probe is not None and model.probe.proves
        return max(own, _PROBE_PATIENCE_S) if proves and model.kv.memory.headroom() > 0 else own

    def _wait_stalled(self) -> None:
        """Waits for an event, the end of the pause, or the time to request memory again."""
        channel, fds = self._model.channel, self._wake_fds()
        if self._arbiter.pause() is None:
            channel.wait(_MEMORY_LOOK_S, fds)
            return
        while pause := self._arbiter.pause_now():
            if channel.wait(max(0.0, min(pause.until - time.monotonic(), _BOARD_LOOK_S)), fds):
                return
            if self._commands.next_deadline_s(time.monotonic()) == 0:
                return

    def _wait_for_way(self) -> None:
        """Waits until no step of another engine goes first any more, for an event, or until a prompt of its own may be
        computed."""
        held = self._prefill_held()
        requests = len(_going_on(self._model.scheduler.running_batch))
        self._arbiter.decoding(requests, time.monotonic())
        while requests and self._arbiter.decode_now():
            if self._model.channel.wait(_BOARD_LOOK_S, self._wake_fds()):
                return
            if (held and not self._prefill_held()) or self._commands.next_deadline_s(time.monotonic()) == 0:
                return

    def _prefill_held(self) -> bool:
        """Whether a prompt waits for the end of a pause, or for decode steps that come first."""
        scheduler = self._model.scheduler
        waits = bool(scheduler.waiting_queue) or scheduler.chunked_req is not None
        return waits and self._arbiter.prefill_now() is not None

    def _park(self) -> None:
        """Parks the first waiting request, which nothing running makes room for: it goes back to the shared queue,
        unless it fits into the memory that is here once that lies in a row. Pages that lie over the edges of extents
        lose something at each end of a row of extents: where there is only the floor, perhaps too much."""
        scheduler = self._model.scheduler
        first = scheduler.waiting_queue[0].rid if scheduler.waiting_queue else None
        if scheduler.chunked_req is None and first != self._started_over_for:
            self._started_over_for = first
            if self._model.provisioning.start_over(self._model.tree):
                return
        retract_chunked(scheduler)
        if scheduler.waiting_queue:
            self.parked(scheduler.waiting_queue.pop(0))

    def parked(self, request: Any) -> None:
        """Returns a request to the shared queue that found no memory; SGLang has let go of it."""
        probe = self._model.probe
        _log.debug("no memory for a request", request=request.rid, prompt_tokens=len(request.origin_input_ids))
        if probe is not None and probe.has(request.rid):
            probe.stop(f"no KV memory for a pass of {len(request.origin_input_ids)} tokens under the present limit")
            return
        entry = self._model.request_table.by_rid(request.rid)
        if entry is not None:
            self._model.request_table.close(entry)
            self._model.channel.send(parked=engine_pb2.Parked(request_id=entry.request_id))

    # --- before SGLang forms a prefill batch

    def may_prefill(self, running: Any) -> bool:
        """Whether SGLang may form a prefill batch. False during a pause, when `running` requests have to decode first,
        when memory has to leave first, or when the next chunk of a prompt has none."""
        model, scheduler = self._model, self._model.scheduler
        if self._arbiter.prefill(lambda: bool(_going_on(running))) is not None:
            return False
        if self._reclaim.over_limit():
            if running.is_empty():
                self._reclaim.shrink(retract_chunked, scheduler)
            return False
        request = scheduler.chunked_req
        if request is not None:
            left = len(request.full_untruncated_fill_ids) - request.prefix_len
            if not model.provisioning.provide_chunk(model.tree, min(left, self.chunk_tokens()) + 1):
                return False
        # Memory may have come since SGLang found none.
        if not model.provisioning.refused or scheduler.last_batch is None:
            scheduler.running_batch.batch_is_full = False
        return True

    def chunk_tokens(self) -> int:
        """Most prompt tokens of the next prefill step: what the throttle allows, but at least the unit that SGLang
        aligns a chunk to."""
        scheduler, tokens = self._model.scheduler, self._arbiter.throttle.chunk_tokens
        whole: int = scheduler.chunked_prefill_size
        if not tokens or not whole:  # None: its options say that prompts are not cut
            return whole
        unit = scheduler.truncation_align_size or scheduler.page_size
        return min(whole, max(unit, tokens // unit * unit))

    # --- before SGLang decodes

    def before_decode(self, batch: Any) -> None:
        """Retracts running requests, one by one, while memory is over the limit with nothing left to evict."""
        self._reclaim.shrink(retract_one, self._model.scheduler, batch)

    def gives_way(self, batch: Any) -> bool:
        """Whether the decode step of this batch, which is due, waits because another engine goes first. A batch whose
        requests are all over, or ending, is not kept waiting."""
        if not self._decodes(batch, self._ranks.now()):
            return False
        self._gave_way = self._arbiter.decode()
        if self._gave_way is None:
            return False
        self._arbiter.progress.disturbed()
        return True

    def _decodes(self, batch: Any, now: float) -> int:
        """Updates the TPOT slack of the batch and publishes the bid. Returns how many of its requests go on."""
        requests, progress = _going_on(batch), self._arbiter.progress
        if progress.is_stale(now):
            self._model.decodes_within(progress.at_most_s)
            self._arbiter.observe(self._streams(requests, now), self._model.decode_step_s, now)
        self._arbiter.decoding(len(requests), now)
        return len(requests)

    def _streams(self, requests: list[Any], now: float) -> Iterator[Stream]:
        """The streams of the requests that have their first token. Its time is when it is seen here, right behind the
        step."""
        for request in requests:
            tokens = len(request.output_ids)
            entry = self._model.request_table.by_rid(request.rid) if tokens else None
            if entry is not None:
                if entry.first_at is None:
                    entry.first_at = now
                yield Stream(entry.first_at, tokens - 1)

    # --- steps

    def results_first(self, copied: Any) -> bool:
        """Whether the results of the last prefill step are here, while another one is about to be launched. `copied`:
        the event of those results. Ranks would not see that alike, so with several it is False."""
        self._prefill_next = self._ranks.size == 1 and copied is not None and bool(copied.query())
        return self._prefill_next

    def decode_begins(self) -> None:
        """Notes that a decode step goes to the device."""
        if self._model.state is EngineState.PROVING:
            self._arbiter.progress.forget_steps()
        counters = self._model.counters
        counters.decode_steps += 1
        counters.urgent_steps += self._arbiter.urgent
        self._arbiter.decode_begins()

    def decode_ended(self) -> None:
        """Notes that the results of a decode step are here."""
        self._arbiter.progress.ended()

    def prefill_begins(self, prompts: int) -> None:
        """Notes that a prefill step of `prompts` prompts goes to the device, and claims the device for it."""
        self._prefill_next = False
        self._prefill_prompts = prompts
        self._arbiter.prefill_begins(self._gaining())

    def prefill_ended(self) -> None:
        """Notes that the results of a prefill step are here, and ends its claim, or claims the device for the next
        one."""
        if self._arbiter.prefill_ended() or self._prefill_next:
            self._arbiter.claim(self._gaining())  # for the step behind it, which begins now
        else:
            self._arbiter.release()

    def _gaining(self) -> int:
        """Prompts that gain by a prefill step that goes first: those in this step and those queued behind it that have
        a free slot; prompts that wait for a decode to end do not count."""
        scheduler, prompts = self._model.scheduler, self._prefill_prompts
        room: int = scheduler.get_num_allocatable_reqs(len(scheduler.running_batch.reqs) + prompts)
        return prompts + min(len(scheduler.waiting_queue), max(0, room))

    # --- where SGLang sleeps

    def sleep(self) -> None:
        """Does the work that waits for SGLang to be idle, returns unused memory, then waits for an event."""
        model = self._model
        self._arbiter.decoding(0, time.monotonic())
        if self._commands.when_idle():
            return
        kv = model.kv
        expected_s = model.kv_transfer.expected_s(time.monotonic())
        if self._expected and not expected_s:
            self.changed()
        self._expected = expected_s > 0
        if model.state is EngineState.ACTIVE and not expected_s:
            kv.settle()
            kv.give_up_empties()
            for number, kind in enumerate(kv.kinds):
                if not self._told_idle and is_scattered(kind):
                    model.counters.moved_tokens += compact(model.tree.of(number), kind) * kv.page_size
                    kind.give_up_empties()
        now = time.monotonic()
        if not self._told_idle:
            self._reclaim.report()
            self._looks = list(_IDLE_LOOKS_S)
        if not self._told_idle or kv.memory.mapped_bytes != self._told_mapped:
            self._send_stats(now)
            self._told_idle = True
        # The driver unmaps asynchronously, so the memory that was reported is looked at again, a few times.
        look = self._looks.pop(0) if self._looks else None
        due = self._commands.next_deadline_s(now)
        waits = [seconds for seconds in (look, due, expected_s or None) if seconds is not None]
        model.channel.wait(min(waits) if waits else None, self._wake_fds())

    # --- reports

    def _tell(self, now: float) -> None:
        """Reports usage and statistics, if they are due."""
        if now - self._stats_at >= EVERY_S and not self._told_idle:
            self._reclaim.report(if_due_at=now)
            self._send_stats(now)

    def _send_stats(self, now: float) -> None:
        """Sends statistics to the gpu_scheduler."""
        model = self._model
        self._stats_at = now
        self._told_mapped = model.kv.memory.mapped_bytes
        stats = engine_stats(
            model.scheduler,
            model.kv,
            model.memory.limit_bytes,
            model.counters,
            self._arbiter.progress.step.seconds,
        )
        model.channel.send(stats=stats)

    def changed(self) -> None:
        """Marks that something happened that the next statistics should report."""
        self._told_idle = False


def _going_on(batch: Any) -> list[Any]:
    """Requests of a batch that go on. A request that is over stays in the batch until the next decode step is formed,
    which may have to wait."""
    return [request for request in batch.reqs if not request.finished() and request.to_finish is None]
