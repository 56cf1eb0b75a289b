"""One request's life between the gateway and the groups: find a place, send the request there, pass its tokens on, and
when the place fails, go on at another as if nothing had happened.

`Relay` holds what all requests share; `Tokens` is one request. Its consumer sees one sequence of chunks, whatever
happened to engines and groups meanwhile. A request that is taken up again has the old prompt with the tokens already
emitted behind it, and what is left of its limits; so nothing is sampled twice and nothing counted twice.
Log-probabilities of the prompt go on behind those that came.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from math import inf

from gateway import metrics, traces
from gateway.errors import BadField, Late, ModelFaulty, NotUp
from gateway.policy.replica_choice import choose
from gateway.request import AnswerJob
from gateway.routing.activation_calls import ActivationCalls
from gateway.routing.groups import GroupLink, GroupLinks
from gateway.routing.prefixes import SentPrefixes
from gateway.routing.routes import RoutePlace, RouteTable
from protos import common_pb2, gpu_scheduler_pb2
from services.errors import Conflict, Invalid, PrismError, Refused, TimedOut, Unavailable, Unmet
from services.telemetry import log
from services.telemetry.spans import Span
from services.wording.paths import without_folders
from services.wording.plurals import counted

_log = log.get(__name__)
_NOT_HERE = "not here"
"""Beginning of a group's error that it does not serve the model: the gateway's routes were old, and nothing failed."""
_HANDED_BACK = "handed back"
"""Error of an engine whose model leaves because placement wants it to, which is no failure of the place."""
_FOR_CLIENTS = {
    _NOT_HERE: "the model had left the group that the request was sent to",
    _HANDED_BACK: "the model left its GPUs before the answer was complete",
}
"""Texts for clients, by the errors of groups and engines that are meant for the gateway."""
_COMPILED_IN_S = 30.0
"""Seconds after which a request may come again whose model's kernels are still being compiled."""


@dataclass(frozen=True, slots=True)
class RelayPatience:
    """How long a request waits, and for what; durations are in seconds."""

    park_s: float
    """Time for finding a place, and for the model to wake there: from when the answer is first waited for, or from when
    its place failed."""
    total_s: float
    """Time from arrival to the last token; 0: no bound."""
    strikes: int
    """How many times in a row its place may fail under a request without a token. Then the request is given up: it may
    be what makes places fail."""
    compile_s: float = 0.0
    """Time that replaces `park_s`, if it is longer, while kernels are being compiled for the model or the first engine
    of its group starts."""
    reach_s: float = 15.0
    """Time for reaching any group at all, if none can be reached: waiting helps less then."""
    first_pause_s: float = 0.05
    longest_pause_s: float = 2.0

    def strikes_of(self, job: AnswerJob) -> int:
        """Strikes that the job may have. A grammar can make an engine hang until it is killed, so a job with a grammar
        gets one at most."""
        return min(self.strikes, 1) if job.sampling.WhichOneof("grammar") else self.strikes

    def pause_s(self, tries: int) -> float:
        """Seconds before the next attempt, after `tries` in a row that brought no token: none after the first, then
        ever longer."""
        return min(self.first_pause_s * 2.0 ** (tries - 2), self.longest_pause_s) if tries > 1 else 0.0


class Relay:
    """What all requests share."""

    def __init__(
        self, routes: RouteTable, links: GroupLinks, activations: ActivationCalls, patience: RelayPatience
    ) -> None:
        self.routes = routes
        self.links = links
        self.activations = activations
        self.patience = patience
        self.prefixes = SentPrefixes()
        """Prefixes of what was sent for models that several groups serve."""
        self._serial = itertools.count(1)
        self._open: set[Tokens] = set()

    def open(self, job: AnswerJob) -> Tokens:
        """Begins a request. The caller must `close` it, finished or not."""
        tokens = Tokens(self, job)
        self._open.add(tokens)
        return tokens

    def closed(self, tokens: Tokens) -> None:
        self._open.discard(tokens)

    def cut(self, fate: PrismError) -> None:
        """Ends all open requests, whose consumers get `fate` raised."""
        for tokens in list(self._open):
            tokens.cut(fate)

    def name_attempt(self, request_id: str) -> str:
        """A name for an attempt, unique at this gateway: clients choose request ids and may choose one twice, and
        chunks that an abandoned attempt still sends must match no request."""
        return f"{request_id}/{next(self._serial)}"


class Attempt:
    """One sending of a request to one group."""

    def __init__(self, tokens: Tokens, link: GroupLink, request_id: str, span: Span) -> None:
        self.link = link
        self.request_id = request_id
        self.span = span
        self._tokens: Tokens | None = tokens

    def deliver(self, chunk: common_pb2.TokenChunk) -> None:
        if self._tokens is not None:
            self._tokens.arrived(chunk)

    def lost(self, reason: str, was_sent: bool) -> None:
        if self._tokens is not None:
            if not was_sent:
                self._tokens.unreached()
            self._tokens.failed(reason, strike=was_sent)

    def leave(self) -> None:
        """Detaches the attempt: nothing that still comes from it counts."""
        self._tokens = None
        self.span.end()

    def cancel(self) -> None:
        self.leave()
        self.link.cancel(self.request_id)


class Tokens:
    """The tokens of one request. One consumer awaits `next` until a chunk has `finish`."""

    def __init__(self, relay: Relay, job: AnswerJob) -> None:
        self._relay = relay
        self._job = job
        self._loop = asyncio.get_running_loop()
        self._ready: deque[common_pb2.TokenChunk] = deque()
        self._waiter: asyncio.Future[None] | None = None
        self._attempt: Attempt | None = None
        self._emitted: list[int] = []
        self._scored = 0  # log-probabilities of the prompt's tokens that have come, from the second token on
        self._fate: PrismError | None = None
        self._timer: asyncio.TimerHandle | None = None
        # The attempts since the last token:
        self._tries = 0
        self._strikes = 0
        self._asked = False
        self._stranded_at: float | None = job.arrival_s
        """Second from which on no place has given it tokens; None while one does."""
        self._paused_at: float | None = None
        """When its place failed; None once tokens have come again."""
        self._pause_reason = ""
        self._emitted_before = 0
        """Tokens that it had by then."""
        self._attempts = 0
        self._why = ""
        self._failed_address = ""
        self._kv_at = ""
        """Address of the group that the one where it ran has given its KV; empty: none, or it has been tried."""
        self._unreached_at: float | None = None  # second since when no group and no placement could be reached

    async def next(self) -> common_pb2.TokenChunk:
        """The next tokens; the last chunk's `finish` is STOP or LENGTH. Raises a PrismError if the request cannot be
        served, or not to its end."""
        if not self._asked:  # of a call with many inputs the last jobs begin long after the call came
            self._asked, self._stranded_at = True, time.monotonic()
        while not self._ready:
            if self._fate is not None:
                raise self._fate
            if self._attempt is None:
                try:
                    await self._start()
                except PrismError:
                    self._tell_pause("given up")
                    raise
            else:
                self._waiter = self._loop.create_future()
                await self._waiter
        return self._ready.popleft()

    def close(self) -> None:
        """Ends the request: an unfinished one is cancelled where it runs."""
        self._tell_pause("cancelled")
        if self._timer is not None:
            self._timer.cancel()
        if self._attempt is not None:
            self._attempt.span.set({"prism.cancelled": True})
        self._abandon()
        self._relay.closed(self)

    def cut(self, fate: PrismError) -> None:
        """Ends the request with the tokens it has: `next` raises `fate`. A request that looks for a place ends once it
        has looked."""
        if self._fate is None:
            self._end(fate)

    # Messages of its place.

    def arrived(self, chunk: common_pb2.TokenChunk) -> None:
        attempt = self._attempt
        assert attempt is not None
        self._unreached_at = None
        if self._job.sampling.prompt_only:  # a group that does not know prompt_only has sampled a token
            del chunk.token_ids[:], chunk.logprobs[:]
        self._scored += len(chunk.prompt_logprobs)
        answers = chunk.token_ids or chunk.finish in (common_pb2.STOP, common_pb2.LENGTH)
        if answers and self._unscored:
            self._end(Unavailable("an engine returned no log-probabilities of the prompt"))
            return
        if chunk.token_ids:
            self._emitted += chunk.token_ids
            self._tries = self._strikes = 0
            if self._stranded_at is not None:
                self._stranded_at = None
                attempt.span.event("first token")
        if answers:
            self._tell_pause("resumed")
        finish = chunk.finish
        if finish in (common_pb2.FINISH_UNSPECIFIED, common_pb2.STOP, common_pb2.LENGTH):
            self._ready.append(chunk)
            if finish:
                attempt.leave()
                self._attempt = None
            self._wake()
            return
        if chunk.token_ids or chunk.prompt_logprobs:
            self._ready.append(_without_end(chunk))
        if finish == common_pb2.FAILED:
            self._kv_at = chunk.kv_address
            self.failed(chunk.error, strike=not chunk.error.startswith((_NOT_HERE, _HANDED_BACK)))
        else:
            self._end(_fate(chunk, self._job))

    @property
    def _unscored(self) -> int:
        """Number of the prompt's tokens whose log-probabilities are wanted and have not come."""
        job = self._job
        return len(job.token_ids) - 1 - self._scored if job.sampling.HasField("prompt_logprobs_from") else 0

    def unreached(self) -> None:
        """Notes that the group or placement could not be reached."""
        if self._unreached_at is None:
            self._unreached_at = time.monotonic()

    def failed(self, why: str, strike: bool) -> None:
        """Ends the attempt: its place gave the request back, or is gone. `strike`: it counts towards giving up."""
        attempt = self._attempt
        assert attempt is not None
        attempt.span.fail("failed" if strike or why == _HANDED_BACK else "not_here", why)
        attempt.leave()
        self._attempt = None
        self._failed_address = attempt.link.address
        why = without_folders(why)
        self._why = _FOR_CLIENTS.get(why, why.removeprefix(f"{_NOT_HERE}: "))
        self._tries += 1
        self._strikes += strike
        if self._stranded_at is None:
            self._stranded_at = time.monotonic()
        if self._paused_at is None:
            self._paused_at, self._pause_reason = time.monotonic(), why
            self._emitted_before = len(self._emitted)
        if self._strikes > self._relay.patience.strikes_of(self._job):
            self._end(
                Unavailable(f"given up after {counted(self._strikes, 'failure')} in a row, the last: {self._why}")
            )
        else:
            self._wake()

    def _tell_pause(self, outcome: str) -> None:
        """Logs one line if the stream pauses: from its place failing until tokens come again, or it has ended.
        `emitted` is the number of tokens before the pause; with 0 the answer had not begun."""
        if self._paused_at is None:
            return
        _log.info(
            "stream paused",
            request_id=self._job.request_id,
            model=self._job.model,
            reason=self._pause_reason,
            ms=round(1e3 * (time.monotonic() - self._paused_at), 1),
            emitted=self._emitted_before,
            outcome=outcome,
            **self._job.span.log_fields,
        )
        self._paused_at = None

    def _end(self, fate: PrismError) -> None:
        self._fate = fate
        self._tell_pause("given up")
        if self._attempt is not None:
            self._attempt.span.fail(type(fate).__name__, str(fate))
        self._abandon()
        self._wake()

    def _abandon(self) -> None:
        attempt, self._attempt = self._attempt, None
        if attempt is not None:
            attempt.cancel()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    # Finding a place and sending the request there.

    async def _start(self) -> None:
        left = self._job.sampling.max_new_tokens - len(self._emitted)
        if left <= 0:  # its place failed between the last token and reporting that it was the last
            self._tell_pause("resumed")
            self._ready.append(common_pb2.TokenChunk(finish=common_pb2.LENGTH))
            return
        place = self._routed() if not self._tries else None
        if place is None:
            place = await self._wait_for_place()
        if self._attempts:
            metrics.REPLAYS.labels(self._job.model).inc()
        self._submit(place, left)

    async def _wait_for_place(self) -> RoutePlace:
        """A place for the request. Raises the error that ends it if there is none in time."""
        span = self._job.span.child("find place")
        if span.recorded:
            before = self._relay.routes.get(self._job.model).residency
            span.set({"gen_ai.request.model": self._job.model, "prism.residency": traces.residency(before)})
        try:
            place = await self._found_in_time()
        except TimeoutError:
            fate = self._out_of_time()
            span.fail(type(fate).__name__, str(fate))
            raise fate from None
        except PrismError as error:
            span.fail(type(error).__name__, str(error))
            raise
        else:
            span.set({"prism.group": place.group})
            return place
        finally:
            span.end()

    async def _found_in_time(self) -> RoutePlace:
        """A place for the request. Raises TimeoutError when the patience is over; that may have grown since the wait
        began."""
        while True:
            bound = asyncio.timeout_at(min(self._park_deadline(), self._total_deadline()))
            try:
                async with bound:
                    return await self._find_place()
            except TimeoutError:
                longer = min(self._park_deadline(), self._total_deadline())
                if not bound.expired() or longer <= self._loop.time():
                    raise

    def _routed(self) -> RoutePlace | None:
        """A place from the routes, active before waking, except the one that just failed; None if there is none. Raises
        ModelFaulty."""
        model = self._job.model
        route = self._relay.routes.get(model)
        if route.faulty:
            raise route.fault
        return self._best([place for place in route.places if place.address != self._failed_address])

    @property
    def _base(self) -> str:
        """The base model of the adapter that the request names; empty: it names none."""
        routes, model = self._relay.routes, self._job.model
        return routes.get(model).model.adapter.base if routes.has(model) else ""

    def _best(self, places: Sequence[RoutePlace]) -> RoutePlace | None:
        """The best of the places: the one that was given the request's KV; else active before waking, connected before
        not. Among several such `replica_choice.choose` chooses."""
        kv_at, self._kv_at = self._kv_at, ""
        if len(places) < 2:
            return places[0] if places else None
        links, job = self._relay.links, self._job
        if (given := next((place for place in places if place.active and place.address == kv_at), None)) is not None:
            self._relay.prefixes.add(given.address, job.model, job.token_ids)
            return given

        def badness(place: RoutePlace) -> tuple[bool, bool]:
            return not place.active, not links.get(place.address).connected

        least = min(map(badness, places))
        found = [place for place in places if badness(place) == least]
        model = self._base or job.model
        cached = self._relay.prefixes.longest([place.address for place in found], job.model, job.token_ids)
        outlooks = [links.get(place.address).outlook(model, cached[place.address]) for place in found]
        tokens, timed = len(job.token_ids) + len(self._emitted), job.slo.ttft_ms and not self._emitted
        number = choose(outlooks, tokens, self._ttft_left_ms() / 1e3 if timed else inf)
        best, link = found[number], links.get(found[number].address)
        link.sends(outlooks[number].first_token_s(tokens) - outlooks[number].queue_s)
        self._relay.prefixes.add(best.address, job.model, job.token_ids)
        return best

    async def _find_place(self) -> RoutePlace:
        """A place for a request for which the routes had none. Tries in turn, with pauses, until one is found: the
        routes without the place that failed; placement, which may know more; and, if placement is away or busy with the
        model, any place of the routes, since the one that failed may have recovered. Raises Unavailable if nothing
        could be reached for `reach_s` seconds."""
        relay = self._relay
        while True:
            if self._unreached_at is not None and time.monotonic() - self._unreached_at > relay.patience.reach_s:
                raise Unavailable(
                    f"no group that serves it could be reached within {relay.patience.reach_s:g} s: {self._why}"
                )
            await asyncio.sleep(relay.patience.pause_s(self._tries))
            place = self._routed()
            if place is not None:
                return place
            try:
                return await relay.activations.activate(self._job.model, self._ttft_left_ms())
            except Unmet as error:
                retry_s = relay.routes.get(self._job.model).retry_s
                raise ModelFaulty(without_folders(str(error)), retry_s) from None
            except Refused as error:
                self._why = without_folders(str(error))
                self._unreached_at = None
            except (Unavailable, TimedOut, Conflict) as error:
                self._why = without_folders(str(error))
                if not isinstance(error, Conflict):
                    self.unreached()
                place = self._best(relay.routes.get(self._job.model).places)
                if place is not None:
                    return place
            self._tries += 1

    def _submit(self, place: RoutePlace, left: int) -> None:
        job, emitted = self._job, self._emitted
        sampling = job.sampling
        if emitted or self._scored:
            sampling = common_pb2.Sampling()
            sampling.CopyFrom(job.sampling)
            sampling.max_new_tokens = left
            if self._unscored:
                sampling.prompt_logprobs_from += self._scored
            else:
                sampling.ClearField("prompt_logprobs_from")
        total = self._relay.patience.total_s
        self._attempts += 1
        span = traces.attempt(job.span, place, number=self._attempts, model=job.model, resumed_tokens=len(emitted))
        submit = gpu_scheduler_pb2.Submit(
            request_id=self._relay.name_attempt(job.request_id),
            model=job.model,
            token_ids=[*job.token_ids, *emitted] if emitted else job.token_ids,
            sampling=sampling,
            slo=job.slo,
            ttft_left_ms=self._ttft_left_ms(),
            has_target=job.slo.ttft_ms > 0,
            time_out_left_ms=max(1, int(1000 * (self._total_deadline() - time.monotonic()))) if total else 0,
            resumed_tokens=len(emitted),
            traceparent=span.traceparent,
            embed=job.embeds,
        )
        link = self._relay.links.get(place.address)
        self._attempt = Attempt(self, link, submit.request_id, span)
        self._set_timer(place.address)
        if link.connected:
            self._unreached_at = None
        link.submit(submit, self._attempt, self._base)

    def _ttft_left_ms(self) -> int:
        if not self._job.slo.ttft_ms:
            return 0
        return int(self._job.slo.ttft_ms - 1000 * (time.monotonic() - self._job.arrival_s))

    # Running out of time.

    def _park_deadline(self) -> float:
        assert self._stranded_at is not None
        patience = self._relay.patience
        park_s = max(patience.park_s, patience.compile_s) if self._compiles() else patience.park_s
        return self._stranded_at + park_s

    def _compiles(self) -> bool:
        return self._relay.routes.compiles(self._job.model)

    def _total_deadline(self) -> float:
        total = self._relay.patience.total_s
        return self._job.arrival_s + total if total else float("inf")

    def _waits_for_waking(self, address: str) -> bool:
        if self._stranded_at is None:
            return False
        return self._relay.routes.residency(self._job.model, address) != common_pb2.ACTIVE

    def _set_timer(self, address: str) -> None:
        """Sets one timer for both bounds. A place that is active by the routes may take as long as the request as a
        whole."""
        if self._timer is not None:
            self._timer.cancel()
        when = self._total_deadline()
        if self._waits_for_waking(address):
            when = min(when, self._park_deadline())
        self._timer = self._loop.call_at(when, self._expired, address) if when != float("inf") else None

    def _expired(self, address: str) -> None:
        self._timer = None
        if self._attempt is None or self._attempt.link.address != address:
            return
        now = time.monotonic()
        if now >= self._total_deadline() or (self._waits_for_waking(address) and now >= self._park_deadline()):
            self._end(self._out_of_time())
        else:
            self._set_timer(address)

    def _out_of_time(self) -> PrismError:
        patience = self._relay.patience
        why = f": {self._why}" if self._why else ""
        if self._stranded_at is not None and self._compiles():
            waited_s = time.monotonic() - self._stranded_at
            return NotUp(
                f"model '{self._job.model}' could not be brought up within {waited_s:.0f} s: the first engine starts, "
                "or kernels are being compiled, which is done once for this machine; try again",
                _COMPILED_IN_S,
            )
        if time.monotonic() >= self._total_deadline():
            return TimedOut(f"not finished within {patience.total_s:g} s{why}")
        return NotUp(f"model '{self._job.model}' could not be brought up within {patience.park_s:g} s{why}")


def _without_end(chunk: common_pb2.TokenChunk) -> common_pb2.TokenChunk:
    rest = common_pb2.TokenChunk()
    rest.CopyFrom(chunk)
    rest.finish = common_pb2.FINISH_UNSPECIFIED
    return rest


def _fate(chunk: common_pb2.TokenChunk, job: AnswerJob) -> PrismError:
    """The error for an end that is neither an answer nor worth another attempt."""
    finish, error = chunk.finish, chunk.error
    if finish == common_pb2.LATE:
        why = f" ({error})" if error else ""
        return Late(f"the first token would have come after its target, and x-slo-drop: late was asked{why}")
    if finish == common_pb2.REJECTED and chunk.grammar_refused:
        return BadField(error, job.grammar_field)
    if finish == common_pb2.REJECTED:
        return Invalid(error or "the engine refused the request")
    if finish == common_pb2.BROKEN:
        return ModelFaulty(error or "the engine cannot use the model's files")
    return Unavailable(error or "the request was aborted")
