"""One model's engine on a group: continuous batching with chunked prefill over elastic KV, as SGLang does it.

An engine does one of two things at a time: a prefill step (a chunk of prompts, first come first served) or a run of
decode steps of all requests whose prefill is through. Prefill goes first; decodes wait for it as long as they have
slack (`gpu_scheduler/engines/sharing/tpot_slack.py`). A run goes on, in one event, until its first request ends or its
memory does; anything that happens before cuts it at the end of the step under way. While other engines decode too each
step is a run of its own: which engine's goes first is decided before each (`decode_order.py`).

Prefixes are not reused. Memory that ended requests leave stays held, and the engine's next tokens take it first.
"""

from __future__ import annotations

import sys
from collections import deque
from heapq import heappop, heappush
from math import inf
from typing import Protocol

from gpu_scheduler.engines.sharing import decode_arbitration, tpot_slack
from gpu_scheduler.engines.sharing.solo_step_time import MOST, DecodeStep, SoloStepTime
from gpu_scheduler.engines.sharing.step_gate import Decodes, StepGate
from gpu_scheduler.engines.sharing.throttle import PrefillThrottle
from gpu_scheduler.engines.sharing.tpot_slack import Stream
from sim.clock import Clock, Timer
from sim.engines.cost import Cost
from sim.engines.decode_order import DecodeOrder
from sim.engines.processor import Processor, Task
from sim.group.memory import SimulatedMemory
from sim.inputs.request import SimulatedRequest

_LOOK_S = 0.05
"""Seconds for which an engine keeps its estimate of a decode step's time: a real engine's `_LOOK_S`."""
_RUN_STEPS = 256
"""The most steps of a decode run for which memory is requested ahead."""


class EngineListener(Protocol):
    """The events that a gpu_scheduler gets from its engines."""

    def first_token(self, engine: SimulatedEngine, request: SimulatedRequest) -> None: ...

    def prefilled(self, engine: SimulatedEngine, request: SimulatedRequest) -> None:
        """A chunk of the request was prefilled, not the last one."""

    def stepped(self, engine: SimulatedEngine, steps: int, tokens: int) -> None:
        """So many decode steps ended since the last call, with so many tokens."""

    def finished(self, engine: SimulatedEngine, request: SimulatedRequest) -> None: ...

    def parked(self, engine: SimulatedEngine, request: SimulatedRequest) -> None:
        """The request did not fit any more; the tokens that it had generated are kept."""


class SimulatedEngine:
    """An engine, awake from its construction on; `retire` parks the requests that it runs."""

    def __init__(
        self,
        clock: Clock,
        name: str,
        cost: Cost,
        processor: Processor,
        memory: SimulatedMemory,
        listener: EngineListener,
        prefill_priority_s: float = 0.0,
        decode_arbitration_s: float = 0.0,
    ) -> None:
        """`prefill_priority_s`: the most seconds that its prefill steps go before decodes of other engines.
        `decode_arbitration_s`: the most seconds that its decodes wait for those of others."""
        self.name = name
        self.cost = cost
        self.listener = listener
        self.last_use = clock.now
        self.used_bytes = 0
        """Bytes of KV on each device that are used at the end of the step or run under way."""
        self.prefill_tokens = 0
        """Prompt tokens that the engine has ever prefilled."""
        self._decoded = 0
        place = next(processor.places)
        self.gate = StepGate(lambda need, requests: decode_arbitration.bid(need, requests, place))
        self._clock = clock
        self._processor = processor
        self._prefill_priority_s = prefill_priority_s
        self._memory = memory
        self._task = Task(self._through)
        self._kv = cost.shape.kv.share(cost.shape.devices)
        self._waiting: deque[SimulatedRequest] = deque()
        """Requests to be prefilled, the first perhaps in part."""
        self._batch: dict[str, SimulatedRequest] = {}
        """Requests that decode, by id."""
        self._ends: list[tuple[int, int, SimulatedRequest]] = []
        """(step that ends the request, a rising number, the request), as a heap; some entries are of requests that left
        the batch."""
        self._joined = 0
        self._steps = 0
        """Decode steps that the engine has ever made."""
        self._context = 0
        """Tokens of the batch's KV."""
        self._partial = 0
        """Tokens of KV of requests that are prefilled in part."""
        self._begun = 0
        """Number of requests that are prefilled in part."""
        self._chunk: list[tuple[SimulatedRequest, int]] = []
        """(request, tokens) of the prefill step under way."""
        self._run = 0
        """Number of steps of the decode run under way."""
        self._run_s = 0.0
        """Seconds that the decode run takes alone."""
        self._cut = False
        """Whether the decode run ends with the step under way."""
        self._began = 0.0
        """Second at which the prefill step or decode run under way began."""
        self._host_free = 0.0
        """Second at which the host is, or was, through with its last step, and may begin another."""
        self._begin_by = inf
        """Second by which the next decode step has to begin (`gpu_scheduler/engines/sharing/tpot_slack.py`)."""
        self._begin_by_of = (-1, -1, -1, 0.0)
        """State for which that was computed: steps, requests that ever joined, requests in the batch, and the TPOT
        bound."""
        self._seen = SoloStepTime()
        self._undisturbed = False
        """Whether the decode run under way has the devices alone, as far as the engine knows."""
        self._believed, self._believed_at = DecodeStep(), -inf
        self._pause: Timer | None = None
        self._order = DecodeOrder(clock, name, self, processor, prefill_priority_s, decode_arbitration_s)

    def __repr__(self) -> str:
        waiting, decoding = len(self._waiting), len(self._batch)
        return f"SimulatedEngine({self.name}, {waiting} to prefill, {decoding} decode, {self.used_bytes} used)"

    # --- requests

    @property
    def requests(self) -> list[SimulatedRequest]:
        """All requests of the engine, in order."""
        return [*self._waiting, *self._batch.values()]

    @property
    def empty(self) -> bool:
        return not self._waiting and not self._batch

    def decode_tokens(self) -> int:
        """Tokens that the engine has ever generated, up to now."""
        done = 0
        if self._run:
            passed = self._run_s - self._processor.left(self._task)
            done = min(self._run, self.cost.steps_in(passed, len(self._batch), self._context)) * len(self._batch)
        return self._decoded + done

    # --- commands

    def generate(self, request: SimulatedRequest) -> None:
        request.prefilled, request.given_at = 0, self._clock.now
        self._waiting.append(request)
        self._poke()

    @property
    def throttle(self) -> PrefillThrottle:
        return self.gate.throttle

    def set_throttle(self, throttle: PrefillThrottle) -> None:
        self.gate.look(self._clock.now, throttle)
        if self._pause is not None:
            self._pause.cancel()
            self._rest()

    def retire(self) -> list[SimulatedRequest]:
        """Stops the engine, and drops everything, even in the middle of a step. Returns its requests, in order."""
        self._settle_run()
        self._processor.rest(self._task)
        if self._pause is not None:
            self._pause.cancel()
            self._pause = None
        self._order.forget()
        gone = self.requests
        for request in list(self._batch.values()):
            self._leave(request)
        self._waiting.clear()
        self._ends, self._chunk, self._partial, self._begun = [], [], 0, 0
        self._count_used()
        return gone

    def _settle_run(self) -> None:
        """Counts the steps of the run under way that have ended."""
        if self._run:
            passed = self._run_s - self._processor.left(self._task)
            steps = min(self._run, self.cost.steps_in(passed, len(self._batch), self._context))
            self._advance(steps)
            self._run = 0

    # --- memory (a Holder)

    def grown(self, came: bool) -> None:
        if not self._task.busy:
            if not came and not self.empty:  # it stood still for that memory
                self._park_newest()
            self._next()

    def limit_fell(self) -> None:
        """Gives memory above the limit back: idle memory at once, that of requests at the end of the step, newest
        first."""
        self._memory.give_back(self.name, self._memory.over_limit(self.name))
        if self._memory.over_limit(self.name):
            if self._task.busy:
                self._cut_run()
            else:
                self._next()

    def _shrink(self) -> None:
        """Gives memory back down to the limit, at the end of a step."""
        over = self._memory.over_limit(self.name)
        if not over:
            return
        self._count_used()
        allowed = self._memory.held(self.name) - over
        while self.used_bytes > allowed and (self._batch or self._partial):
            self._park_newest()
        self._memory.give_back(self.name, self._memory.over_limit(self.name))

    def _need(self, tokens: int = 0, requests: int = 0) -> int:
        """Bytes of all its requests with so many tokens more, and so many requests more."""
        return self._kv.bytes_of(self._tokens + tokens, self._requests + requests)

    def _fits(self, tokens: int, requests: int = 0) -> bool:
        """Whether so many more tokens, and requests, fit into the memory that is held."""
        return self._need(tokens, requests) <= self._memory.held(self.name)

    def _has_memory_for(self, tokens: int, wanted: int, requests: int = 0) -> bool:
        """Whether `tokens` more of so many requests more fit; if they do not, requests memory for `wanted`."""
        if self._fits(tokens, requests):
            return True
        self.used_bytes = self._need()
        held = self._memory.held(self.name)
        lacking = self._need(tokens, requests) - held
        return self._memory.grow(self.name, lacking, self._need(max(tokens, wanted), requests) - held)

    @property
    def _tokens(self) -> int:
        return self._context + self._partial

    @property
    def _requests(self) -> int:
        """Number of requests that have KV."""
        return len(self._batch) + self._begun

    def _count_used(self, more: int = 0) -> None:
        self.used_bytes = self._need(more)

    # --- the loop

    def _poke(self) -> None:
        if not self._task.busy:
            self._next()
        elif self._run and self._pause is None:
            self._cut_run()

    def _cut_run(self) -> None:
        """Ends the run with the step under way."""
        if not self._run or self._cut:
            return
        self._cut = True
        batch = len(self._batch)
        passed = self._run_s - self._processor.left(self._task)
        self._run = min(self._run, self.cost.steps_in(passed, batch, self._context) + 1)
        self._run_s = self.cost.decode(self._run, batch, self._context)
        self._decodes(max(0.0, self._run_s - passed))

    def _through(self) -> None:
        """Handles the end of a prefill step or a decode run."""
        if self._chunk:
            self._end_chunk()
        else:
            run, self._run = self._run, 0
            self._advance(run)
            if run:
                self._see(run)
                # The host has little to do for a decode step, which is one graph.
                step_s = (self._clock.now - self._began) / run
                self._host_free = max(self._host_free, self._clock.now - step_s)
            self.listener.stepped(self, run, run * len(self._batch))
            while self._ends and self._ends[0][0] <= self._steps:
                _, _, request = heappop(self._ends)
                if request.id in self._batch and request.finish_step <= self._steps:
                    self._finish(request)
        self._shrink()
        self._next()

    def _next(self) -> None:
        """Decides what to do now. Its task is idle."""
        held = bool(self._waiting and self._batch) and self._holds()
        decodes = held and self._decode(1)
        stands_still = decodes and self._order.yielding
        if decodes and not stands_still:
            return
        # Decodes that stand still themselves hold up no prefill.
        if self._waiting and self._pause is None and self._prefill():
            return
        if stands_still or (self._batch and self._decode()):
            return
        self._count_used()
        self._processor.rest(self._task)

    def _holds(self) -> bool:
        """Whether a decode step comes before the next prefill step. This is decided anew before each: a step may be
        slower than it is alone, and decodes that stand still hold nothing up."""
        return self.gate.decodes_first(self._clock.now, self.decodes) is not None

    def _believes(self) -> DecodeStep:
        """The engine's own estimate of a decode step alone."""
        now = self._clock.now
        if now - self._believed_at > _LOOK_S:
            self._believed, self._believed_at = self._seen.seen(self.cost.decode_step_s, now), now
        return self._believed

    def _see(self, run: int) -> None:
        """Takes the steps of an ended run, except the first, into the estimate."""
        apart_s = (self._clock.now - self._began) / run
        for step in range(max(1, run - MOST), run):
            self._seen.given(self._began + step * apart_s, self._undisturbed)

    @property
    def decodes(self) -> Decodes:
        """The batch as the step gate weighs it."""
        step = self._believes()
        if self.throttle.step_s == 0 or not self._batch:
            return Decodes(len(self._batch), inf, step)
        now = self._clock.now
        steps = self._steps
        if self._run > 1:
            passed = self._run_s - self._processor.left(self._task)
            steps += min(self._run, self.cost.steps_in(passed, len(self._batch), self._context))
        of = (steps, self._joined, len(self._batch), self.throttle.step_s)
        if of != self._begin_by_of:
            streams = (Stream(each.joined_at, steps - each.joined_step) for each in self._batch.values())
            self._begin_by = now + tpot_slack.slack_s(streams, now, step.seconds, self.throttle.step_s)
            self._begin_by_of = of
        return Decodes(len(self._batch), self._begin_by, step)

    # --- prefill

    def _prefill(self) -> bool:
        whole = self.cost.chunk_tokens
        most = min(whole, self.throttle.chunk_tokens or whole)
        seconds, left = 0.0, most
        room = most_at_once = self.cost.hardware.most_running - len(self._batch)
        for request in list(self._waiting):
            if left <= 0 or room <= 0:
                break
            tokens = min(left, request.to_prefill - request.prefilled)
            needed = tokens + (request.prefilled + tokens == request.to_prefill)  # its first token, too
            begins = request.prefilled == 0
            if not self._has_memory_for(needed, needed, begins):
                break
            self._chunk.append((request, tokens))
            self._partial += needed
            self._begun += begins
            seconds += self.cost.prefill_part(tokens, request.prefilled)
            left -= tokens
            room -= 1
        if not self._chunk:
            self._stuck()
            return False
        self._count_used()
        self._began = self._clock.now
        self.gate.look(self._began, self.throttle)
        self.gate.prefill_began()
        self._order.prefills()
        self._seen.disturbed()
        tokens = most - left
        host_from = self._clock.now
        if self._task.busy:
            host_from = max(self._host_free, *(request.given_at for request, _ in self._chunk))
        host_until = max(self._clock.now, host_from + self.cost.prefill_host(tokens))
        self._host_free = host_until + self.cost.prefill_after(tokens)
        self._processor.work(
            self._task,
            self.cost.prefill_devices(seconds),
            first=min(len(self._waiting), most_at_once),
            first_s=self._prefill_priority_s,
            host_s=host_until - self._clock.now,
            gaps_s=self.cost.prefill_gaps(seconds, tokens),
        )
        return True

    def _stuck(self) -> None:
        """Handles a lack of memory for the next prompt. Decodes end and leave theirs; if there are none and no memory
        is coming, the prompt is put back into the queue."""
        if not self._batch and not self._memory.waits(self.name):
            self._park(self._drop_first())

    def _drop_first(self) -> SimulatedRequest:
        """Removes the first request to be prefilled; only that one may be prefilled in part."""
        request = self._waiting.popleft()
        self._partial -= request.prefilled
        self._begun -= request.prefilled > 0
        return request

    def _end_chunk(self) -> None:
        now = self._clock.now
        chunk, self._chunk = self._chunk, []
        done: list[SimulatedRequest] = []
        for request, tokens in chunk:
            request.prefilled += tokens
            self.prefill_tokens += tokens
            if request.prefilled == request.to_prefill:
                done.append(request)
                self._waiting.popleft()
                self._partial -= request.prefilled + 1
                self._begun -= 1
                self._join(request)
            else:
                self.listener.prefilled(self, request)
        self.gate.prefill_ended()
        self.gate.no_prefill_next()
        self.gate.look(now, self.throttle)
        if self.throttle.pause_ratio > 0:
            self._rest()
        for request in done:
            self.listener.first_token(self, request)
            if request.most_new_tokens == 0:
                self._finish(request)

    def _rest(self) -> None:
        """Begins the pause behind the last prefill step, as long as the throttle now requires."""
        now = self._clock.now
        pause = self.gate.pause(now, self.throttle.pause_ratio)
        self._pause = self._clock.after(0.0 if pause is None else pause.until - now, self._unpause)

    def _unpause(self) -> None:
        self._pause = None
        self._poke()

    # --- decode

    def _join(self, request: SimulatedRequest) -> None:
        """Adds a request to the batch: its prefill gave its first token, or the next one after it was parked."""
        self._context += request.to_prefill + 1
        request.generated += 1
        self._decoded += 1
        request.joined_step, request.joined_at = self._steps, self._clock.now
        request.finish_step = self._steps + request.most_new_tokens
        if not self._batch:
            self._order.begin()
        self._batch[request.id] = request
        self._joined += 1
        heappush(self._ends, (request.finish_step, self._joined, request))

    def _decode(self, most: int = sys.maxsize) -> bool:
        """Begins at most so many decode steps. Returns False if it has to wait for memory."""
        if self._order.stands_still():
            self._seen.disturbed()
            self._count_used()
            self._processor.rest(self._task)
            return True
        if self._order.step_by_step or self._order.last:
            most = 1
        batch = len(self._batch)
        while self._ends[0][2].finish_step != self._ends[0][0] or self._ends[0][2].id not in self._batch:
            heappop(self._ends)
        steps = min(most, self._ends[0][0] - self._steps)
        if not self._fits(batch * steps):
            self._has_memory_for(batch, batch * min(steps, _RUN_STEPS))
            free = self._kv.most_tokens(self._memory.held(self.name), self._requests) - self._tokens
            steps = min(steps, free // batch)
            if steps <= 0:
                return self._starved()
        self._count_used(batch * steps)
        self._began = self._clock.now
        self._run, self._cut = steps, False
        self._run_s = self.cost.decode(steps, batch, self._context)
        self._undisturbed = self.gate.undisturbed
        self._seen.given(self._clock.now, self._undisturbed)
        self._order.begins()
        self._decodes(self._run_s)
        return True

    @property
    def batch(self) -> int:
        return len(self._batch)

    @property
    def prefills(self) -> bool:
        return bool(self._chunk) or (bool(self._waiting) and self._pause is None and not self._holds())

    def look(self) -> None:
        if not self._task.busy and not self.empty:
            self._next()

    def cut(self) -> None:
        if self._run > 1:
            self._cut_run()

    def _decodes(self, seconds: float) -> None:
        devices = self.cost.decode_share(len(self._batch), self._context)
        self._processor.work(self._task, seconds, decodes=True, devices=devices)

    def _starved(self) -> bool:
        """Handles a batch for which not one more step fits. Returns whether there is something to do nevertheless."""
        if self._memory.waits(self.name):
            return False
        self._park_newest()
        if self._batch:
            return self._decode()
        # Prompts that waited for a prefill had no room beside the requests that are parked now.
        return bool(self._waiting) and self._pause is None and self._prefill()

    def _advance(self, steps: int) -> None:
        self._steps += steps
        self._decoded += steps * len(self._batch)
        self._context += steps * len(self._batch)

    def _leave(self, request: SimulatedRequest) -> None:
        """Takes a request out of the batch."""
        del self._batch[request.id]
        if not self._batch:
            self._order.end()
        request.generated += self._steps - request.joined_step
        self._context -= request.prompt_tokens + request.generated

    def _finish(self, request: SimulatedRequest) -> None:
        self._leave(request)
        request.ended_at = self.last_use = self._clock.now
        self._count_used()
        self.listener.finished(self, request)

    def _park_newest(self) -> None:
        if self._batch:
            request = next(reversed(self._batch.values()))
            self._leave(request)
        else:
            request = self._drop_first()
        self._park(request)

    def _park(self, request: SimulatedRequest) -> None:
        request.prefilled = 0
        request.parked += 1
        self._count_used()
        self.listener.parked(self, request)
