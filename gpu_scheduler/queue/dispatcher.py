"""The shared queue of a group, carried out: requests come in, the core of the group decides (`policy/group_core.py`),
engines run the requests, tokens go back.

Every event (a request, a cancellation, tokens, a change of memory or of a residency) marks the queue as changed; one
plan follows for all events that came together; the core's next deadline is a timer. Nothing polls.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable
from math import inf

from gpu_scheduler.config import Arbitration
from gpu_scheduler.engines.engine import EngineProcess
from gpu_scheduler.engines.shared_board import SharedBoard
from gpu_scheduler.memory.devices import count
from gpu_scheduler.memory.group_memory import GroupMemory
from gpu_scheduler.policy.group_core import GroupCore
from gpu_scheduler.policy.group_facts import ModelFacts, Presence, ServedModel
from gpu_scheduler.policy.memory.migrated_prefixes import MigratedPrefixes
from gpu_scheduler.policy.queue.decisions import Drop, Expire, NeedMemory, RequestMemory, SetThrottle, Start, StartRule
from gpu_scheduler.queue.outlooks import OutlookNews
from gpu_scheduler.queue.requests import GroupRequest
from gpu_scheduler.queue.streams import GatewayStream
from gpu_scheduler.residents import Resident, Residents
from gpu_scheduler.telemetry.counters import STARTED, TTFT_TARGETS, forget
from gpu_scheduler.telemetry.traces import RequestTrace
from kv_kinds import messages as kv_messages
from kv_kinds.layout import of_tokens
from protos import common_pb2, engine_pb2, gpu_scheduler_pb2
from services.telemetry import log

_log = log.get(__name__)
NOT_HERE = "not here"
"""First words of an error after which the gateway asks for another place: nothing failed while the request ran."""
_PRESENCE = {common_pb2.ACTIVE: Presence.ACTIVE, common_pb2.WAKING: Presence.WAKING}
"""Presence by residency of the models whose requests are taken; in other residencies a model is down."""


class Dispatcher:
    """Owns the requests of a group, and receives its engines' tokens."""

    def __init__(
        self,
        rules: Arbitration,
        residents: Residents,
        memory: GroupMemory,
        board: SharedBoard,
        on_need_memory: Callable[[NeedMemory], None],
        on_engine_death: Callable[[EngineProcess], None],
        now: Callable[[], float] = time.monotonic,
        migrated_prefixes: MigratedPrefixes | None = None,
        on_idle_or_busy: Callable[[], None] = lambda: None,
        request_memory: Callable[[RequestMemory], None] = lambda request: None,
    ) -> None:
        """`on_need_memory` is called for each request that lacks memory, at each plan; `on_engine_death` after the
        requests of a dead engine were failed; `on_idle_or_busy` when a model gets its first request or its last one has
        left; `request_memory` to make a request that `memory_answered` answers."""
        self._residents = residents
        self._memory = memory
        self._board = board
        board.set_prefill_priority(rules.prefill_priority_ms / 1e3, rules.prefill_priority_batch)
        board.set_decode_arbitration(rules.decode_arbitration_ms / 1e3)
        self._on_need_memory = on_need_memory
        self._on_engine_death = on_engine_death
        self._on_idle_or_busy = on_idle_or_busy
        self._request_memory = request_memory
        self._now = now
        self._migrated_prefixes = migrated_prefixes or MigratedPrefixes()
        self._core = GroupCore(rules.group, now())
        self.outlook_news = OutlookNews(self._outlook)
        self._requests: dict[str, GroupRequest] = {}
        self._by_gateway_id: dict[tuple[GatewayStream, str], GroupRequest] = {}
        self._numbers = 0
        self._order = 0
        self._loop = asyncio.get_running_loop()
        self._planning = True
        """True while a plan is due, and before and after `run`, when none is made."""
        self._timer: asyncio.TimerHandle | None = None
        self._failed: asyncio.Future[None] = self._loop.create_future()

    # --- requests

    def submit(self, submit: gpu_scheduler_pb2.Submit, stream: GatewayStream) -> None:
        """Takes a request into the queue, or answers at once that it cannot be served here."""
        now = self._now()
        self._numbers += 1
        adapter = self._residents.adapter(submit.model)
        request = GroupRequest.of(submit, self._numbers, stream, now, adapter)
        resident = self._residents.get(request.model)
        if resident is None or resident.residency not in _PRESENCE:
            request.end(common_pb2.FAILED, NOT_HERE)
            return
        if adapter is not None and not resident.takes(adapter):  # placement has its base loaded again
            request.end(common_pb2.FAILED, f"{NOT_HERE}: {adapter.base} was loaded without room for this adapter")
            return
        if (stream, request.gateway_id) in self._by_gateway_id:
            request.end(common_pb2.REJECTED, f"request id {request.gateway_id} is in use on this stream")
            return
        if why := request.impossible(resident.spec):
            request.end(common_pb2.REJECTED, why)
            return
        self._requests[request.id] = request
        self._by_gateway_id[stream, request.gateway_id] = request
        if request.resumed_tokens:
            request.cached_tokens = self._migrated_prefixes.cached_tokens(request.prefixes, request.token_ids, now)
        self._core.arrived(request.arrived(), now)
        if self.model(request.model).requests == 1:
            self._on_idle_or_busy()
        if submit.traceparent:
            waking = resident.residency == common_pb2.WAKING
            slack_s = self._core.backlog.slack(request.id, now)
            request.trace = RequestTrace.of(submit.traceparent, now, slack_s, waking)
        if request.cached_tokens:
            self._arm()  # it waits for others
        else:
            self.changed()

    def cancel(self, stream: GatewayStream, gateway_id: str) -> None:
        """Cancels a request that its gateway gave up. No further chunk is sent."""
        request = self._by_gateway_id.get((stream, gateway_id))
        if request is not None:
            if request.engine is not None:
                request.engine.abort(request.id)
            self._forget(request, common_pb2.ABORTED)

    def cancel_stream(self, stream: GatewayStream) -> None:
        """Cancels all requests of a gateway that is gone."""
        stream.close()
        for of_stream, gateway_id in [key for key in self._by_gateway_id if key[0] is stream]:
            self.cancel(of_stream, gateway_id)

    def hand_back(self, model: str, why: str = NOT_HERE) -> None:
        """Ends all waiting requests of a model that cannot be served here any more; their gateways ask for another
        place."""
        for request_id in self._core.waiting_of(model):
            self._end(self._requests[request_id], common_pb2.FAILED, why)

    def go_on_at(self, request_ids: Iterable[str], address: str) -> None:
        """Notes that the group at `address` has the KV of these requests: their gateways are told when they end here
        unfinished."""
        for request_id in request_ids:
            if (request := self._requests.get(request_id)) is not None:
                request.kv_address = address

    def _end(self, request: GroupRequest, finish: common_pb2.Finish, error: str = "") -> None:
        request.end(finish, error)
        self._forget(request, finish, error)

    def _forget(self, request: GroupRequest, finish: common_pb2.Finish, error: str = "") -> None:
        if self._requests.pop(request.id, None) is None:
            return
        now = self._now()
        if request.paused_at:
            self._tell_pause(request, now, "ended here")
        del self._by_gateway_id[request.stream, request.gateway_id]
        self._core.ended(request.id, now, len(request.emitted))
        request.end_trace(now, finish, error)
        if not self.model(request.model).requests:
            self._on_idle_or_busy()
        self.changed()

    # --- residencies

    def residency_changed(self, resident: Resident) -> None:
        """Called by Residents after every change of a residency."""
        name = resident.spec.name
        here = self._residents.get(name) is not None
        for forgotten in self._core.model_changed(name, _facts(resident, here), self._now()):
            forget(forgotten)
        self.changed()

    # --- memory

    def memory_answered(self, request: RequestMemory, granted: bool) -> None:
        """The memory that was requested is there, or will not come."""
        self._core.memory_answered(request, granted, self._now())
        if granted:
            self.changed()

    # --- engines (the Listener of engines/engine.py)

    def on_tokens(self, engine: EngineProcess, chunks: list[common_pb2.TokenChunk]) -> None:
        now, model, tokens = self._now(), "", 0
        if (resident := self._residents.of_engine(engine)) is not None:
            self._core.step_ended(resident.spec.name, now)
        for chunk in chunks:
            request = self._requests.get(chunk.request_id)
            if request is None or request.engine is not engine:
                continue  # the request was cancelled, or the chunk is of an earlier attempt
            ends = chunk.finish == common_pb2.LENGTH  # a request with `prompt_only` ends without a token
            if chunk.token_ids or chunk.embedding or ends:
                if request.paused_at:
                    self._tell_pause(request, now)
                if self._core.backlog.prefills(request.id):
                    self._first_token(request, chunk, now)
            request.emitted.extend(chunk.token_ids)
            request.scored += len(chunk.prompt_logprobs)
            model, tokens = request.model, tokens + len(chunk.token_ids)
            chunk.request_id = request.gateway_id
            if request.kv_address and chunk.finish == common_pb2.FAILED:
                chunk.kv_address = request.kv_address
            request.stream.push(chunk)
            if chunk.finish:
                self._forget(request, chunk.finish, chunk.error)
        if tokens:
            self._core.tokens(model, tokens, now)

    def _first_token(self, request: GroupRequest, chunk: common_pb2.TokenChunk, now: float) -> None:
        met = self._core.first_token(request.id, now, chunk.cached_tokens)
        if met is not None:
            TTFT_TARGETS.labels(request.model, str(met).lower()).inc()
        if request.trace is not None:
            request.trace.first_token(now, chunk.cached_tokens)
        if request.resumed_tokens and not request.answered:
            _log.info(  # this line shows why its client waited in the middle of an answer
                "stream resumed",
                request_id=request.logged_id,
                model=request.served_as,
                tokens=request.prompt_tokens,
                brought=request.cached_tokens,
                cached=chunk.cached_tokens,
                queued_ms=round(1e3 * (request.sent_at - request.arrival), 1),
                prefill_ms=round(1e3 * (now - request.sent_at), 1),
            )
        request.answered = True
        self.changed()

    def _pause(self, request: GroupRequest, now: float, reason: str) -> None:
        """Notes that a stream stands still; a second pause before the first ended belongs to the first."""
        if not request.paused_at:
            request.paused_at, request.pause_reason = now, reason

    def _tell_pause(self, request: GroupRequest, now: float, outcome: str = "resumed") -> None:
        """Logs one line for each pause of a stream in this group. The gateway logs the pause of a stream that its place
        gave back or lost."""
        _log.info(
            "stream paused",
            request_id=request.logged_id,
            model=request.served_as,
            reason=request.pause_reason,
            ms=round(1e3 * (now - request.paused_at), 1),
            emitted=len(request.emitted),
            outcome=outcome,
        )
        request.paused_at = 0.0

    def on_prefilled(self, engine: EngineProcess, prompts: list[engine_pb2.Prefilled.Prompt]) -> None:
        now = self._now()
        for prompt in prompts:
            request = self._requests.get(prompt.request_id)
            if request is None or request.engine is not engine:
                continue
            if self._core.prefilled(request.id, now, prompt.computed_tokens, prompt.cached_tokens):
                self.changed()

    def on_parked(self, engine: EngineProcess, request_id: str) -> None:
        request = self._requests.get(request_id)
        if request is None or request.engine is not engine:
            return
        request.engine = None
        now = self._now()
        self._pause(request, now, "no KV memory")
        if request.trace is not None:
            request.trace.parked(now)
        resident = self._residents.get(request.model)
        if resident is None or resident.residency not in _PRESENCE:
            # The model is leaving and its waiting requests were handed back already: nothing would start this one here.
            self._end(request, common_pb2.FAILED, NOT_HERE)
            return
        self._core.retracted(request.id, now, request.prompt_tokens, request.most_new_tokens)
        self.changed()

    def on_retracted(self, engine: EngineProcess, request_id: str, reason: str) -> None:
        request = self._requests.get(request_id)
        if request is not None and request.engine is engine:
            self._pause(request, self._now(), reason)

    def on_stats(self, engine: EngineProcess, stats: engine_pb2.EngineStats) -> None:
        resident = self._residents.of_engine(engine)
        if resident is not None:
            resident.stats = stats
            self.changed()

    def on_death(self, engine: EngineProcess) -> None:
        for request in [r for r in self._requests.values() if r.engine is engine]:
            self._end(request, common_pb2.FAILED, "its engine died")
        self._on_engine_death(engine)

    # --- the loop

    def changed(self) -> None:
        """Has one plan made for all events that come in this iteration of the event loop."""
        if not self._planning:
            self._planning = True
            self._loop.call_soon(self._wake)

    def _wake(self) -> None:
        try:
            self._plan()
            self._arm()
            self.outlook_news.changed()
        except Exception as failure:  # `run` raises it, which ends the process
            self._failed.set_exception(failure)
            return
        self._planning = False  # until here, because requests that the plan itself ends or starts need no other plan

    def _arm(self) -> None:
        """Has the next plan made when it is due if nothing happens before."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        wait = self._core.next_plan_at() - self._now()
        if wait < inf:
            self._timer = self._loop.call_later(max(0.0, wait), self.changed)

    async def run(self) -> None:
        """Plans whenever something changed or the policy's next deadline is here, in callbacks: a task in between would
        cost every first token a task switch. Runs for ever; raises what a plan raised."""
        self._planning = False
        self.changed()
        try:
            await self._failed
        finally:
            self._planning = True  # no more plans
            self.outlook_news.close()
            if self._timer is not None:
                self._timer.cancel()

    def _plan(self) -> None:
        now = self._now()
        for decision in self._core.plan(now, lambda: self._memory.devices):
            match decision:
                case Start(request_id, why):
                    self._start(self._requests[request_id], why, now)
                case SetThrottle(model, throttle):
                    resident = self._residents.get(model)
                    if resident is not None and resident.engine is not None:
                        self._board.set_throttle(resident.engine.index, throttle)
                case NeedMemory():
                    self._on_need_memory(decision)
                case RequestMemory():
                    self._request_memory(decision)
                case Drop(request_id, reason):
                    self._end(self._requests[request_id], common_pb2.LATE, reason)
                case Expire(request_id, reason):
                    self._end(self._requests[request_id], common_pb2.FAILED, reason)

    def _start(self, request: GroupRequest, why: StartRule, now: float) -> None:
        resident = self._residents.get(request.model)
        assert resident is not None and resident.engine is not None
        request.engine, request.sent_at = resident.engine, now
        self._order += 1
        STARTED.labels(request.model, why.value).inc()
        if request.trace is not None:
            request.trace.sent(now, why.value, resident)
        resident.engine.generate(request.generate(self._order))

    # --- reports

    def queue_state(self) -> gpu_scheduler_pb2.QueueState:
        """The queue as the last plan left it."""
        now = self._now()
        state = gpu_scheduler_pb2.QueueState()
        queue_plan, backlog = self._core.queue_plan, self._core.backlog
        places = {request_id: f"on time {i + 1}" for i, request_id in enumerate(queue_plan.on_time)}
        places |= {request_id: f"second {i + 1}" for i, request_id in enumerate(queue_plan.second)}
        state.busy_s = max(0.0, queue_plan.start - now)
        for request in self._requests.values():
            resident = self._residents.get(request.model)
            waking = resident is None or resident.residency != common_pb2.ACTIVE
            place = "running" if request.engine is not None else places.get(request.id, "waiting")
            state.requests.add(
                request_id=request.gateway_id,
                model=request.model,
                adapter="" if request.adapter is None else request.adapter.name,
                waiting_s=now - request.arrival,
                slack_s=backlog.slack(request.id, now),
                cost_s=backlog.prefill_cost(request.id),
                place=place + (", model waking" if waking and request.engine is None else ""),
            )
        return state

    def _outlook(self) -> gpu_scheduler_pb2.Outlook:
        """What a new request meets here now."""
        now, outlook = self._now(), gpu_scheduler_pb2.Outlook()
        for resident in self._residents:
            if resident.residency == common_pb2.ACTIVE:
                name = resident.spec.name
                queue_s, tokens_per_s = self._core.outlook(name, now)
                waiting, running, _ = self._core.count(name)
                outlook.models.add(model=name, queue_s=queue_s, tokens_per_s=tokens_per_s, requests=waiting + running)
        return outlook

    def demand(self) -> dict[str, float]:
        """The demand w (`policy/memory/demand.py`) of every resident model."""
        now = self._now()
        specs = [resident.spec for resident in self._residents]
        return {spec.name: self._core.demand(spec.name, now, spec.default_slo.tpot_ms / 1e3) for spec in specs}

    def model(self, name: str) -> ServedModel:
        """The record of a model and of its requests; made if there is none yet."""
        return self._core.model(name, self._now())

    def count(self, model: str) -> tuple[int, int, int]:
        """(waiting, running, late among the waiting) requests of a model; late by the last plan. It looks at no
        request, because it is called for every model many times a second."""
        return self._core.count(model)

    def work_of(self, engine: EngineProcess) -> tuple[int, float]:
        """(number of the engine's requests, expected seconds of prefill of those that have no token yet)."""
        resident = self._residents.of_engine(engine)
        return (0, 0.0) if resident is None else self._core.work_of(resident.spec.name)

    def all_requests(self) -> int:
        """Number of requests of all models that wait or run."""
        return len(self._core)

    def lacking_bytes(self, model: str) -> int:
        """KV bytes on each device that the model's waiting requests lack; 0: none."""
        return self._core.shortages.of(model, self._now())

    def idle_s(self, model: str) -> float:
        """Seconds since the model's last request arrived or ended; 0 while one is here."""
        return self._core.idle_s(model, self._now())


def _facts(resident: Resident, here: bool) -> ModelFacts:
    """The resident in the core's terms. `here`: False if its record has left the group."""
    spec, measured = resident.spec, resident.measured
    presence = _PRESENCE.get(resident.residency, Presence.DOWN) if here else Presence.GONE
    return ModelFacts(
        presence,
        kv=kv_messages.layout(measured) or kv_messages.layout(spec).share(count(spec)) or of_tokens(1),
        prefill_tokens_per_s=measured.prefill_tokens_per_s,
        prefill_chunk_tokens=measured.prefill_chunk_tokens,
        decode_step_s=measured.decode_step_ms / 1e3,
        most_running=measured.most_running,
        up_s=resident.up_s,
        cold_s=resident.cold_s,
    )
