"""What an engine does between two steps: cases that run in a process which has imported SGLang (`forks`), over
stand-ins for SGLang's scheduler and for memory. `test_loop.py` names them."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock, patch

from sglang.srt.managers.schedule_batch import FINISH_ABORT
from sglang.srt.managers.scheduler_components.new_token_ratio_tracker import NewTokenRatioTracker

from gpu_scheduler.engines import shared_board
from gpu_scheduler.engines.sglang.base import current
from gpu_scheduler.engines.sglang.base.states import EngineState
from gpu_scheduler.engines.sglang.hooks import loop as hooks
from gpu_scheduler.engines.sglang.hooks import scheduler as hooked_scheduler
from gpu_scheduler.engines.sglang.hooks.scheduler import EngineScheduler, Scheduler
from gpu_scheduler.engines.sglang.model.loaded_model import LoadedModel
from gpu_scheduler.engines.sglang.model.stats import EngineCounters
from gpu_scheduler.engines.sglang.policy.agreement import StepAgreement
from gpu_scheduler.engines.sglang.ranks.ranks import Alone
from gpu_scheduler.engines.sglang.step.current import set_loop
from gpu_scheduler.engines.sglang.step.loop import StepLoop
from gpu_scheduler.engines.sglang.step.reclaim import Reclaim
from gpu_scheduler.engines.sglang.step.retraction import retract_one
from gpu_scheduler.engines.shared_board import BoardSeat, SharedBoard
from gpu_scheduler.engines.sharing.step_gate import StepAnswer, StepWait, WaitReason
from gpu_scheduler.engines.sharing.throttle import FREE, PrefillThrottle
from protos import engine_pb2

INDEX, NEIGHBOUR = 1, 2
LOOK_S = 0.002
"""Two looks at the board: a wait that has ended is noticed within that."""


class Clock:
    """The time of the engine, which passes only while it waits, or a test says so."""

    def __init__(self) -> None:
        self.now = 100.0

    def monotonic(self) -> float:
        return self.now

    def wait(self, seconds: float, fds: Sequence[int] = ()) -> bool:
        self.now += seconds
        return False


class Bench:
    """A loop with its board and clock, over a scheduler that has nothing to do."""

    def __init__(self, throttle: PrefillThrottle = FREE, state: EngineState = EngineState.ACTIVE) -> None:
        self.clock = Clock()
        for module in ("loop", "arbiter"):
            patch(f"gpu_scheduler.engines.sglang.step.{module}.time", self.clock).start()
        self.board = SharedBoard(shared_board.create())
        self.throttle = throttle
        self.model = MagicMock()
        model = self.model
        model.ranks, model.probe, model.state = Alone(), None, state
        model.ranks.now = self.clock.monotonic
        model.decode_step_s, model.counters = 0.0, EngineCounters()
        model.channel.receive, model.channel.closed, model.channel.wait = lambda: [], False, self.clock.wait
        model.options.park_after_ms, model.options.linger_ms = 1e9, 0
        self.scheduler, self.memory = model.scheduler, model.memory.kv
        self.scheduler.waiting_queue, self.scheduler.chunked_req, self.scheduler.last_batch = [], None, None
        self.scheduler.running_batch.reqs = []
        self.scheduler.get_num_allocatable_reqs = lambda running: 0
        self.scheduler.running_batch.is_empty = lambda: not self.scheduler.running_batch.reqs
        self.memory.woken, self.memory.overage_bytes.return_value = False, 0
        model.kv_transfer.expected_s.return_value = 0
        self.loop = StepLoop(MagicMock(model=model), BoardSeat(self.board, INDEX))
        patch.object(self.loop, "_reclaim").start()
        patch.object(self.loop, "_tell").start()

    @property
    def throttle(self) -> PrefillThrottle:
        return self.board.throttle(INDEX)

    @throttle.setter
    def throttle(self, throttle: PrefillThrottle) -> None:
        self.board.set_throttle(INDEX, throttle)

    @contextmanager
    def forming(self, form: Callable[..., Any], rows: int = 8, most: int | None = None) -> Iterator[None]:
        """Has `form` stand for SGLang's choice of a prefill batch, for which there are `rows` in the table of requests
        and at most `most` prompts may begin; None: any number."""
        with (
            patch.object(current, "model", lambda: self.model),
            patch.object(Scheduler, "get_new_batch_prefill", form),
            patch.object(Scheduler, "get_num_allocatable_reqs", lambda *_: rows),
            patch.object(hooked_scheduler, "get_schedule", lambda: SimpleNamespace(prefill_max_requests=most)),
        ):
            yield

    def prefill_step(self, seconds: float) -> None:
        self.loop.prefill_begins(1)
        self.clock.now += seconds
        self.loop.prefill_ended()

    def decode_step(self, seconds: float) -> None:
        """Asked for, begun and ended; the engine looks at the time before."""
        self.loop.pull()
        assert not self.loop.gives_way(self.scheduler.running_batch)
        self.loop.decode_begins()
        self.loop.decode_ended()
        self.clock.now += seconds

    def neighbour_prefills_until(self, end: float) -> None:
        """Decode steps wait that long: a claim holds for the time that others wait, and counts from when it is made."""
        self.board.set_prefill_priority(1.0, 0)
        self.board.claim(NEIGHBOUR, end - 1.0, 1)
        self.board.set_prefill_priority(1000.0, 0)

    def gave_way(self) -> None:
        """The last step did nothing because another engine went first."""
        assert self.loop.gives_way(self.scheduler.running_batch)

    def bid(self) -> float | None:
        """The share that the engine bids for; None: it makes no bid."""
        bids = self.board.bids(NEIGHBOUR, self.clock.now)
        return bids[0].need if bids else None

    def first_token(self, at: float | None) -> None:
        """Of all requests."""
        self.model.request_table.by_rid.return_value.first_at = at


def request(*, over: bool = False) -> MagicMock:
    """One that runs, with its first token, or that has ended and is still in its batch."""
    made = MagicMock(to_finish=None, output_ids=[7])
    made.finished.return_value = over
    return made


def gives_up_the_last(batch: SimpleNamespace) -> tuple[list[MagicMock], float, list[MagicMock]]:
    """Retracts a batch of which not even one request fits, with SGLang's results and its change to the request."""
    left, batch.reqs = batch.reqs, []
    left[-1].to_finish = "out of memory"
    return left[:-1], NewTokenRatioTracker.estimate_new_token_ratio_after_retract(batch.reqs), left[-1:]


# --- cases


def reclaim_before_a_stalled_engine_waits() -> None:
    """What ranks agreed on holds until they receive again: a reclaim that came with it must not be lost in the wait."""
    bench = Bench(PrefillThrottle(128, 1e9))
    agreements = [StepAgreement(news=True, wanted=7), StepAgreement()]

    class Several(Alone):
        size = 2
        agreed = StepAgreement()
        answer = StepAnswer(PrefillThrottle(128, 1e9))

    ranks = Several()
    ranks.now = bench.clock.monotonic  # type: ignore[method-assign]
    model = bench.model

    def receive() -> list[engine_pb2.ToEngine]:
        ranks.agreed = agreements.pop(0)
        return []

    model.ranks, model.channel.receive, model.channel.wait = ranks, receive, MagicMock()
    bench.scheduler.waiting_queue = ["waits for the end of a pause"]
    model.tree.unlocked_nodes.return_value = model.tree.unlocked_ages.return_value = ()
    model.tree.evictable_size.return_value = 0
    memory, kv = bench.memory, model.kv
    type(memory).woken = property(lambda _: ranks.agreed.news)
    memory.take_reclaims = lambda: ranks.agreed.wanted
    memory.extent_bytes, kv.leaving.return_value, kv.used, kv.give_up_empties.return_value = 1, 7, 0, 7
    loop = StepLoop(MagicMock(model=model), BoardSeat(bench.board, INDEX))
    loop.pull()
    memory.reclaimed.assert_called_once()
    kv.give_up_empties.assert_called()
    model.channel.wait.assert_not_called()


def pause_is_a_multiple_of_the_step_before_it() -> None:
    """The time that was waited before the step does not count."""
    bench = Bench(PrefillThrottle(128, 2.0))
    bench.loop.pull()
    bench.scheduler.waiting_queue = ["a long prompt"]
    began = []
    for _ in range(4):
        began.append(round(bench.clock.now, 2))
        bench.prefill_step(1.0)
        bench.loop.pull()
    assert began == [100.0, 103.0, 106.0, 109.0], began


def probe_waits_longer_for_memory_that_its_limit_allows() -> None:
    def parked_after(probe: MagicMock | None, headroom: int) -> float:
        bench = Bench()
        bench.model.options.park_after_ms = 200
        bench.scheduler.waiting_queue = ["a prompt"]
        bench.model.probe, bench.model.kv.memory.headroom.return_value = probe, headroom
        began = bench.clock.now
        with patch.object(bench.loop, "_park") as park:
            while not park.called:
                bench.loop.pull()
                assert bench.clock.now < began + 60
        return round(bench.clock.now - began, 1)

    def probe(proves: bool) -> MagicMock:
        return MagicMock(proves=proves, next_requests=lambda: [])

    assert parked_after(None, headroom=3) == 0.2
    assert parked_after(probe(True), headroom=3) == 5.0
    assert parked_after(probe(True), headroom=0) == 0.2, "its limit does not allow more"
    assert parked_after(probe(False), headroom=3) == 0.2, "the model is proven"


def no_step_begins_whose_requests_all_end_with_the_results_of_the_last() -> None:
    def asked(
        *to_finish: str | None,
        waiting: Sequence[str] = (),
        extend: bool = False,
        overlap: bool = True,
        last: bool = True,
    ) -> bool:
        """Whether SGLang is asked for the next batch."""
        scheduler, running, before = object.__new__(EngineScheduler), MagicMock(), MagicMock()
        scheduler.enable_overlap, scheduler.waiting_queue, scheduler.chunked_req = overlap, list(waiting), None
        running.reqs = [MagicMock(to_finish=reason) for reason in to_finish]
        before.forward_mode.is_decode.return_value = not extend
        with patch.object(Scheduler, "get_next_batch_to_run") as original:
            plan = scheduler.get_next_batch_to_run(running_batch=running, last_batch=before if last else None)
        if not original.called:
            assert plan.batch_to_run is None and plan.running_batch is running
        return bool(original.called)

    assert not asked("stopped") and not asked("stopped", "stopped")
    assert asked("stopped", None), "one goes on"
    assert asked("stopped", waiting=["another"])
    assert asked("stopped", extend=True), "what was prefilled has yet to join those that run"
    assert asked("stopped", last=False), "no results are on their way: SGLang has to let go of them"
    assert asked("stopped", overlap=False)
    assert asked()


def ping_is_answered_where_the_socket_is_read() -> None:
    bench = Bench()
    bench.model.channel.receive = lambda: [engine_pb2.ToEngine(ping=engine_pb2.Ping())]
    bench.model.memory.kv = None
    assert bench.loop.pull() == []
    bench.model.channel.send.assert_any_call(pong=engine_pb2.Pong())


def engine_that_waits_for_a_neighbour_goes_on_when_its_own_pause_ends() -> None:
    """The pause is as long as the step before asks for, not longer by the time that the engine waited."""
    bench = Bench(PrefillThrottle(128, 1.0))
    bench.scheduler.waiting_queue, bench.scheduler.running_batch.reqs = ["a prompt"], [request()]
    bench.neighbour_prefills_until(200.0)
    bench.loop.pull()
    bench.prefill_step(1.0)
    bench.gave_way()
    bench.loop.pull()
    assert 102.0 <= bench.clock.now < 102.0 + LOOK_S, bench.clock.now

    bench.scheduler.waiting_queue = []
    bench.neighbour_prefills_until(150.0)
    bench.gave_way()
    bench.loop.pull()
    assert 150.0 <= bench.clock.now < 150.0 + LOOK_S, bench.clock.now
    bench.loop.pull()
    assert bench.clock.now < 150.0 + LOOK_S, "it gave way once"


def batch_in_which_nothing_goes_on_waits_for_no_engine_and_makes_no_bid() -> None:
    """Requests that are over stay in the batch until the next step is formed."""
    bench = Bench(PrefillThrottle(step_s=0.008))
    bench.model.decode_step_s = 0.005
    bench.board.set_decode_arbitration(1.0)
    bench.first_token(None)
    batch = bench.scheduler.running_batch
    batch.reqs = [request(over=True), request()]
    bench.loop.pull()
    assert bench.bid() == 0.62, "its first token is seen, and leaves 3 ms"
    assert bench.model.request_table.by_rid.return_value.first_at == bench.clock.now
    end = bench.clock.now + 0.5
    bench.neighbour_prefills_until(end)
    bench.gave_way()
    assert bench.bid() is None, "it stands still"
    bench.loop.pull()
    assert end <= bench.clock.now < end + LOOK_S

    batch.reqs = [request(over=True)]
    began = bench.clock.now
    bench.neighbour_prefills_until(began + 0.5)
    assert not bench.loop.gives_way(batch)
    bench.loop.pull()
    assert bench.clock.now == began and bench.bid() is None

    bench.board.release(NEIGHBOUR)
    batch.reqs = [request()]
    bench.first_token(None)
    bench.clock.now += 0.1
    bench.loop.pull()
    assert bench.bid() == 0.62
    bench.model.state = EngineState.WARM  # its memory is not what this is about
    bench.loop.sleep()
    assert bench.bid() is None


def results_that_are_there_go_out_before_another_prefill_step_is_launched() -> None:
    bench = Bench()
    loop, ranks = bench.loop, bench.model.ranks
    set_loop(loop)
    bench.board.set_prefill_priority(1000.0, 0)

    def batch(prefill: bool) -> SimpleNamespace:
        return SimpleNamespace(forward_mode=SimpleNamespace(is_extend=lambda: prefill))

    def first(
        now: SimpleNamespace | None, last: SimpleNamespace | None, there: bool | None = True, sglang: bool = False
    ) -> bool:
        copied = there if there is None else SimpleNamespace(query=lambda: there)
        queue = deque([(last, SimpleNamespace(copy_done=copied))] if last else [])
        scheduler = object.__new__(EngineScheduler)
        scheduler.result_queue = queue
        with (
            patch.object(current, "model", lambda: bench.model),
            patch.object(Scheduler, "is_disable_overlap_for_batch", lambda *_: sglang),
        ):
            return bool(scheduler.is_disable_overlap_for_batch(now, last))

    def claimed() -> int:
        return bench.board.claimed(NEIGHBOUR, bench.clock.now)

    prefill, decode = batch(True), batch(False)
    assert first(prefill, prefill)
    for now, last in ((decode, prefill), (prefill, decode), (None, prefill), (prefill, None)):
        assert not first(now, last)
    assert not first(prefill, prefill, there=False) and not first(prefill, prefill, there=None)
    assert first(decode, decode, sglang=True), "SGLang has reasons of its own"
    ranks.size = 2
    assert not first(prefill, prefill)

    # The claim on the devices lasts from one to the other as well.
    ranks.size = 1
    bench.scheduler.waiting_queue, bench.scheduler.running_batch.reqs = ["behind them"] * 3, ["decodes"]
    slots = 4  # of requests that run: one prompt of those that wait finds one
    bench.scheduler.get_num_allocatable_reqs = lambda running: slots - running
    loop.prefill_begins(2)
    assert claimed() == 3 and first(prefill, prefill)
    loop.prefill_ended()
    assert claimed() == 3
    slots = 2
    loop.prefill_begins(2)
    assert claimed() == 2, "more requests than slots take nothing from those in the step"
    assert not first(decode, prefill)
    loop.prefill_ended()
    assert claimed() == 0


def engine_measured_beside_busy_ones_learns_that_it_keeps_its_target() -> None:
    """Otherwise it would make no bid, and its requests be late, for as long as it lives."""
    bench = Bench(PrefillThrottle(step_s=0.020), EngineState.PROVING)
    bench.board.set_decode_arbitration(1.0)
    bench.first_token(None)
    bench.scheduler.running_batch.reqs = [request()]
    model = bench.model
    believed = SimpleNamespace(measured=engine_pb2.Measured(decode_step_ms=40.0), decode_step_s=0.040)

    def decodes_within(seconds: float) -> None:
        LoadedModel.decodes_within(believed, seconds)  # type: ignore[arg-type]
        believed.decode_step_s = model.decode_step_s = believed.measured.decode_step_ms / 1e3

    model.decode_step_s, model.decodes_within = 0.040, decodes_within
    for _ in range(20):
        bench.decode_step(0.001)
    assert model.decode_step_s == 0.040, "that was the probe, or of another model"
    model.state = EngineState.ACTIVE
    for _ in range(10):
        bench.decode_step(0.012)
    assert bench.bid() is None, "its target seems out of reach"
    for _ in range(20):
        bench.decode_step(0.012)
    bench.first_token(None)
    bench.clock.now += 0.1
    bench.loop.pull()
    assert 0.012 <= model.decode_step_s < 0.013, model.decode_step_s
    assert bench.bid() == round(model.decode_step_s / 0.020, 2), "a first token leaves no slack"
    for _ in range(40):
        bench.decode_step(0.030)
    assert model.decode_step_s < 0.013, "slower ones say nothing"


def wait_for_a_neighbour_tells_why() -> None:
    bench = Bench(PrefillThrottle(step_s=0.008))
    bench.model.decode_step_s = 0.005
    bench.scheduler.running_batch.reqs = [request()]
    bench.neighbour_prefills_until(100.5)
    bench.gave_way()
    assert bench.loop._gave_way == StepWait(1100.0, WaitReason.NEIGHBOUR_PREFILL)


def requests_that_are_about_to_end_end_when_they_are_retracted() -> None:
    """A request that is about to end keeps its reason when it is retracted, and its prompt is not computed again."""
    # A drain would wait for that prompt.
    bench = Bench()
    model, running, left = bench.model, request(), [request(), request()]
    model.scheduler.new_token_ratio_tracker.current = 0.5
    for each in left:
        each.to_finish = FINISH_ABORT("the client is gone")
    reasons = [each.to_finish for each in left]
    for chunked in (None, MagicMock()):
        model.scheduler.chunked_req = chunked
        with patch.object(hooks.current, "model", lambda: model), patch.object(hooks.current, "loop") as loop:
            batch = SimpleNamespace(reqs=[running, *left])
            assert hooks.retraction(gives_up_the_last, batch) == ([running], 0.5, left), chunked
            loop.return_value.parked.assert_not_called()
        assert [each.to_finish for each in left] == reasons, chunked
    scheduler, one = MagicMock(), request()
    batch = MagicMock(reqs=[one])
    batch.is_empty.return_value, batch._get_decode_retraction_order.side_effect = False, lambda reqs: [0]
    assert retract_one(scheduler, batch) is one
    scheduler._add_request_to_queue.assert_called_once_with(one, is_retracted=True)
    one.rid, one.to_finish = "1", reasons[0]
    assert retract_one(scheduler, batch) is one
    scheduler._add_request_to_queue.assert_called_once()
    ((sent, of), _) = scheduler.send_abort_output.call_args
    assert (sent.rid, sent.finished_reason["message"], of) == ("1", "the client is gone", one)


def retractions_are_counted_and_reported_with_their_reasons() -> None:
    """A request that SGLang gives up goes back into the shared queue; the others stay here, and that one too while a
    half computed prompt has the memory."""
    bench = Bench()
    model = bench.model
    model.scheduler.chunked_req, model.scheduler.new_token_ratio_tracker.current = None, 0.5
    model.retracted = lambda request, reason: LoadedModel.retracted(model, request, reason)
    model.request_table.by_rid = lambda rid: None if rid == "probe" else MagicMock(request_id=f"of {rid}")
    requests = [MagicMock(rid=rid, to_finish=None) for rid in ("1", "probe", "2")]
    with patch.object(hooks.current, "model", lambda: model), patch.object(hooks.current, "loop") as loop:
        assert hooks.retraction(gives_up_the_last, SimpleNamespace(reqs=requests)) == (requests[:2], 0.5, [])
        loop.return_value.parked.assert_called_once_with(requests[2])
        model.scheduler.chunked_req, given_up = MagicMock(), MagicMock(rid="4", to_finish=None)
        assert hooks.retraction(gives_up_the_last, SimpleNamespace(reqs=[given_up])) == ([given_up], 0.5, [])
        assert given_up.to_finish is None
        loop.return_value.parked.assert_called_once()
    running = [MagicMock(rid="3", to_finish=None), MagicMock(rid="5", to_finish=FINISH_ABORT())]
    bench.memory.overage_bytes, bench.memory.extent_bytes = lambda: min(1, len(running)), 1
    model.ranks, model.kv_transfer.busy = SimpleNamespace(size=2), False  # several ranks move no KV
    model.kv.leaving.return_value, model.kv.give_up_empties.return_value = 1, 0
    Reclaim(model, MagicMock()).shrink(running.pop)
    sent = [call.kwargs["retracted"] for call in model.channel.send.call_args_list if "retracted" in call.kwargs]
    reasons = [(message.request_id, message.reason) for message in sent]
    beside = [(f"of {number}", "no KV memory for the running batch") for number in ("1", "4")]
    assert reasons == [*beside, ("of 3", "KV memory over its limit")], reasons
    assert model.counters.retractions == 5


def requests_begin_behind_a_prompt_in_parts_of_a_model_with_states_although_one_was_refused_before() -> None:
    """SGLang takes the bound of the step in which nothing begins beside that prompt for a full batch, which lasts."""
    bench = Bench()
    set_loop(bench.loop)
    bench.model.provisioning.refused = True
    bench.loop.may_prefill = lambda running: True  # type: ignore[method-assign]
    running = SimpleNamespace(reqs=[], batch_is_full=False)
    scheduler = object.__new__(EngineScheduler)
    scheduler.grammar_manager = MagicMock(**{"has_waiting_grammars.return_value": False})
    scheduler.waiting_queue, scheduler.chunked_req = ["behind it"], "in parts"
    scheduler.chunked_prefill_size = 512
    admitted: list[int] = []

    def form(self: EngineScheduler, batch: SimpleNamespace) -> SimpleNamespace:
        admitted.append(self.get_num_allocatable_reqs(0))
        batch.batch_is_full = admitted[-1] <= 1
        return SimpleNamespace(batch_to_run=None, running_batch=batch)

    with bench.forming(form):
        scheduler.get_new_batch_prefill(running)
    assert admitted == [1] and not running.batch_is_full
    assert scheduler.most_admitted is None and scheduler.chunked_prefill_size == 512


class Waiting:
    """A request in SGLang's queue."""

    def __init__(self, rid: str, priority: int = 0) -> None:
        self.rid, self.priority = rid, priority
        self.time_stats = SimpleNamespace(wait_queue_entry_time=0.0)


def states_come_for_the_request_that_is_first_by_its_priority_and_the_step_is_cut_for_that_one() -> None:
    """SGLang sorts the queue later, when it forms the batch."""
    bench = Bench()
    set_loop(bench.loop)
    bench.loop.may_prefill = lambda running: True  # type: ignore[method-assign]
    bench.model.ranks = SimpleNamespace(size=2)  # which request no memory ahead
    looked_up: list[str] = []

    def provide(_tree: Any, first: list[Any], *_: Any) -> int:
        looked_up.extend(each.rid for each in first)
        return 2

    def until_shared(_tree: Any, request: Any, _most: int, *, begins: bool) -> int:
        assert (request.rid, begins) == ("first", True)
        return 300

    states = bench.model.state_provisioning
    states.provide, states.until_shared = provide, until_shared
    running = SimpleNamespace(reqs=[], batch_is_full=False)
    scheduler = object.__new__(EngineScheduler)
    scheduler.grammar_manager = MagicMock(**{"has_waiting_grammars.return_value": False})
    scheduler.waiting_queue, scheduler.chunked_req = [Waiting("second", 5), Waiting("first", 1)], None
    scheduler.chunked_prefill_size, scheduler.policy = 512, SimpleNamespace(priority_sign=1)
    scheduler.new_token_ratio_tracker = SimpleNamespace(current=0.5)
    formed: list[tuple[int | None, int | None]] = []

    def form(self: EngineScheduler, batch: SimpleNamespace) -> SimpleNamespace:
        formed.append((self.chunked_prefill_size, self.most_admitted))
        return SimpleNamespace(batch_to_run=None, running_batch=batch)

    with bench.forming(form):
        scheduler.get_new_batch_prefill(running)
    assert looked_up == ["first", "second"] and formed == [(300, 1)]


def request_whose_grammar_is_ready_behind_the_look_for_it_begins_with_a_state() -> None:
    """SGLang looks at grammars too, and starts a request whose grammar is ready by then."""
    bench = Bench()
    set_loop(bench.loop)
    bench.loop.may_prefill = lambda running: True  # type: ignore[method-assign]
    bench.model.state_provisioning.provide = lambda *_: 1
    bench.model.state_provisioning.until_shared = lambda *_, **__: 0
    bench.model.ranks = SimpleNamespace(size=2)  # which request no memory ahead
    running = SimpleNamespace(reqs=[], batch_is_full=False)
    scheduler = object.__new__(EngineScheduler)
    compiled: list[list[Any]] = [[], [Waiting("with a grammar")]]
    grammars = {"has_waiting_grammars.side_effect": lambda: bool(compiled)}
    scheduler.grammar_manager = MagicMock(
        **{"get_ready_grammar_requests.side_effect": lambda: compiled.pop(0)}, **grammars
    )
    scheduler.waiting_queue, scheduler.chunked_req, scheduler.chunked_prefill_size = [], None, 512
    scheduler.new_token_ratio_tracker = SimpleNamespace(current=0.5)
    scheduler.policy = SimpleNamespace(priority_sign=1)
    scheduler._add_request_to_queue = scheduler.waiting_queue.append
    begun: list[tuple[str, int | None]] = []

    def form(self: EngineScheduler, batch: SimpleNamespace) -> SimpleNamespace:
        if self.grammar_manager.has_waiting_grammars():
            self.waiting_queue += self.grammar_manager.get_ready_grammar_requests()
        begun.extend((each.rid, self.most_admitted) for each in self.waiting_queue)
        return SimpleNamespace(batch_to_run=None, running_batch=batch)

    with bench.forming(form):
        assert scheduler.get_new_batch_prefill(running).batch_to_run is None
        assert begun == []
        scheduler.get_new_batch_prefill(running)
    assert begun == [("with a grammar", 1)]


def a_step_looks_for_states_for_no_more_requests_than_sglang_admits() -> None:
    bench = Bench()
    set_loop(bench.loop)
    bench.loop.may_prefill = lambda running: True  # type: ignore[method-assign]
    bench.model.ranks = SimpleNamespace(size=2, now=lambda: 7.0)  # which request no memory ahead
    provided: list[int] = []
    taken: list[tuple[int, float]] = []
    bench.model.state_provisioning.provide = lambda _tree, waiting, *_: provided.append(len(waiting)) or 1
    bench.model.state_provisioning.note_taken = lambda *said: taken.append(said)
    bench.model.state_provisioning.available = 3
    scheduler = object.__new__(EngineScheduler)
    scheduler.grammar_manager = MagicMock(**{"has_waiting_grammars.return_value": False})
    scheduler.waiting_queue = [Waiting(f"{number}") for number in range(50)]
    scheduler.chunked_req, scheduler.chunked_prefill_size = None, 512
    scheduler.new_token_ratio_tracker = SimpleNamespace(current=0.5)
    scheduler.policy = SimpleNamespace(priority_sign=1)
    bench.model.state_provisioning.until_shared = lambda *_, **__: 0
    running = SimpleNamespace(reqs=["r"] * 5, batch_is_full=False)

    def form(_self: EngineScheduler, batch: SimpleNamespace) -> SimpleNamespace:
        bench.model.state_provisioning.available = 1
        return SimpleNamespace(batch_to_run=SimpleNamespace(reqs=["a"]), running_batch=batch)

    for rows, most, count in ((8, None, 8), (8, 4, 4), (0, 4, 0), (-1, None, 0)):
        with bench.forming(form, rows, most):
            bench.model.state_provisioning.available = 3
            scheduler.get_new_batch_prefill(running)
        assert provided.pop() == count and taken.pop() == (2, 7.0)


def free_states_stay_for_the_next_steps_if_states_were_evicted_for_them() -> None:
    bench = Bench()
    reclaim = Reclaim(bench.model, lambda: None)
    bench.scheduler.is_fully_idle = lambda: False
    bench.model.provisioning.evicted_lately = lambda _now: False
    states = bench.model.kv.states
    cases = ((True, [], None, 0), (False, ["a"], None, 0), (False, [], "in parts", 0), (False, [], None, 1))
    for lately, waiting, in_parts, left in cases:
        bench.model.state_provisioning.evicted_lately = lambda _now, lately=lately: lately
        bench.scheduler.waiting_queue, bench.scheduler.chunked_req = waiting, in_parts
        states.give_up_empties.reset_mock()
        reclaim.attend(bench.clock.now)
        assert states.give_up_empties.call_count == left
