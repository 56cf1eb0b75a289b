"""The queue carried out, with engines that only record what they are told."""

import asyncio
from dataclasses import replace

import pytest
from structlog.testing import capture_logs

from gpu_scheduler.config import Arbitration
from gpu_scheduler.engines import shared_board
from gpu_scheduler.engines.shared_board import SharedBoard
from gpu_scheduler.engines.sharing.throttle import FREE, PrefillThrottle
from gpu_scheduler.memory.group_memory import GroupMemory
from gpu_scheduler.policy.memory.kv_shortage import LASTING_S
from gpu_scheduler.policy.memory.migrated_prefixes import MigratedPrefixes
from gpu_scheduler.policy.throttle.interference import WINDOW
from gpu_scheduler.queue.dispatcher import Dispatcher
from gpu_scheduler.queue.streams import PulledStream
from gpu_scheduler.residents import Residents
from gpu_scheduler.telemetry import counters
from protos import balloond_pb2, common_pb2, engine_pb2, gpu_scheduler_pb2
from services.runtime import tasks
from testing.patience import PATIENCE_S

NAMES = ("a", "b", "e", *(f"m{number}" for number in range(200)))
SPEC = {name: common_pb2.ModelSpec(name=name, context_tokens=1000, kv_bytes_per_token=10) for name in NAMES}
SPEC["e"].embedding.dimensions = 2


class FakeEngine:
    """As much of an engine as a dispatcher touches."""

    def __init__(self, index):
        self.index = index
        self.started = []
        self.aborted = []
        self.forgotten = []

    def generate(self, message):
        self.started.append(message)

    def abort(self, request_id):
        self.aborted.append(request_id)

    def forget_adapter(self, adapter):
        self.forgotten.append((adapter.name, adapter.generation))


class _Timers:
    """The loop, but for its clock: what is due later is collected."""

    def __init__(self, due):
        self._due = due
        self._loop = asyncio.get_running_loop()

    def __getattr__(self, name):
        return getattr(self._loop, name)

    def call_later(self, _delay, callback):
        self._due.append(callback)
        return self._loop.call_soon(lambda: None)


class Desk:
    """A dispatcher whose clock stands still, with a stream that collects."""

    def __init__(self, **rules):
        self.time = 100.0
        self.needs, self.deaths, self.turns, self.requested = [], [], [], []
        self.memory = GroupMemory(["cpu:0"])
        self.board = SharedBoard(shared_board.create())
        self.brought = MigratedPrefixes()
        self.residents = Residents(lambda resident: self.dispatcher.residency_changed(resident))
        self.dispatcher = Dispatcher(
            Arbitration(**rules),
            self.residents,
            self.memory,
            self.board,
            self.needs.append,
            self.deaths.append,
            lambda: self.time,
            self.brought,
            lambda: self.turns.append({name: self.dispatcher.count(name)[:2] for name in SPEC}),
            self.requested.append,
        )
        self.due = []
        """Calls of timers. The clock stands still, so none is made by itself, however long a test takes."""
        self.dispatcher._loop = _Timers(self.due)
        self.stream = PulledStream(1)
        self.chunks = []
        self.engines = {}

    def model(self, name, residency=common_pb2.ACTIVE):
        resident = self.residents.enter(SPEC[name])
        engine = self.engines[name] = FakeEngine(len(self.engines) + 1)
        resident.engine = engine
        self.residents.set(resident, residency)
        return engine

    def submit(self, request_id, model="a", tokens=10, new=5, ttft_ms=None, *, alone=False, logprobs_from=None, **keys):
        submit = gpu_scheduler_pb2.Submit(
            request_id=request_id,
            model=model,
            token_ids=range(tokens),
            sampling=common_pb2.Sampling(max_new_tokens=new, prompt_only=alone, prompt_logprobs_from=logprobs_from),
            **keys,
        )
        if ttft_ms is not None:
            submit.slo.ttft_ms = submit.ttft_left_ms = ttft_ms
            submit.has_target = True
        self.dispatcher.submit(submit, self.stream)

    def answer(self, engine, index=-1, tokens=(1,), finish=common_pb2.FINISH_UNSPECIFIED):
        chunk = common_pb2.TokenChunk(request_id=engine.started[index].request_id, token_ids=tokens, finish=finish)
        self.dispatcher.on_tokens(engine, [chunk])

    async def settle(self):
        """Until the dispatcher has seen everything that happened so far."""
        for _ in range(5):
            await asyncio.sleep(0)
        while self.stream._chunks:
            self.chunks += self.stream._chunks
            self.stream._chunks = []

    def last(self, request_id):
        return [chunk for chunk in self.chunks if chunk.request_id == request_id][-1]


@pytest.fixture
async def desk():
    desk = Desk()
    running = tasks.spawn(desk.dispatcher.run(), "dispatcher")
    yield desk
    await tasks.cancel(running)


async def test_a_request_goes_to_its_engine_and_its_tokens_come_back_under_the_gateways_id(desk):
    engine = desk.model("a")
    desk.submit("r1")
    await desk.settle()
    assert list(engine.started[0].token_ids) == list(range(10))
    desk.answer(engine, tokens=[7, 8])
    desk.answer(engine, tokens=[9], finish=common_pb2.LENGTH)
    await desk.settle()
    assert [(c.request_id, list(c.token_ids)) for c in desk.chunks] == [("r1", [7, 8]), ("r1", [9])]
    assert desk.dispatcher.count("a") == (0, 0, 0)


async def test_request_for_a_model_that_is_not_here_fails_at_once(desk):
    desk.submit("r1")
    await desk.settle()
    assert (desk.last("r1").finish, desk.last("r1").error) == (common_pb2.FAILED, "not here")


async def test_request_for_an_adapter_goes_to_its_bases_engine_once_that_has_room_for_it(desk):
    adapter = common_pb2.Adapter(name="x", base="a", generation=7, rank=8, modules=["q_proj"])
    listed = {"x": common_pb2.ModelSpec(name="x", context_tokens=1000, adapter=adapter)}
    desk.residents.heard_catalogue(listed)
    engine = desk.model("a")
    desk.submit("r1", "x")
    await desk.settle()
    assert desk.last("r1").error == "not here: a was loaded without room for this adapter"
    resident = desk.residents.get("a")
    for rank, room in ((4, False), (8, True)):
        roomy = common_pb2.ModelSpec(name="a", context_tokens=1000, kv_bytes_per_token=10)
        roomy.adapters.CopyFrom(common_pb2.AdapterPool(slots=2, rank=rank, modules=["q_proj"]))
        assert desk.residents.is_outdated(resident) == (resident.loaded is not None)
        desk.residents.listed["a"] = common_pb2.ModelSpec(name="a", context_tokens=1000, adapters=roomy.adapters)
        desk.residents.listed["a"].adapters.rank = 8
        resident.loaded = roomy, roomy
        assert desk.residents.is_outdated(resident) == (not room) and resident.takes(adapter) == room
    desk.submit("r2", "x")
    desk.submit("r3", "a")
    await desk.settle()
    assert [message.adapter.name for message in engine.started] == ["x", ""]
    told = desk.dispatcher.queue_state().requests
    assert {(each.model, each.adapter) for each in told} == {("a", ""), ("a", "x")}
    assert desk.dispatcher.count("a") == (0, 2, 0)
    desk.residents.heard_catalogue({"a": desk.residents.listed["a"]})
    assert engine.forgotten == [("x", 7)]


async def test_prompt_only_request_takes_memory_for_its_prompt_and_is_on_time_when_it_ends(desk):
    engine = desk.model("a")
    desk.submit("r1", tokens=1000, new=1, ttft_ms=5000, alone=True)
    await desk.settle()
    assert desk.dispatcher.model("a").committed == 1000 * 10
    desk.answer(engine, tokens=(), finish=common_pb2.LENGTH)
    await desk.settle()
    assert desk.last("r1").finish == common_pb2.LENGTH
    assert (desk.dispatcher.model("a").ttft_met, desk.dispatcher.count("a")) == (1, (0, 0, 0))


async def test_prompt_logprobs_of_a_parked_request_go_on_behind_those_already_passed_on(desk):
    engine = desk.model("a")
    desk.submit("r1", tokens=10, logprobs_from=1)
    await desk.settle()

    def tell(count):
        scores = [common_pb2.TokenLogprob()] * count
        name = engine.started[-1].request_id
        desk.dispatcher.on_tokens(engine, [common_pb2.TokenChunk(request_id=name, prompt_logprobs=scores)])

    async def again():
        desk.dispatcher.on_parked(engine, engine.started[-1].request_id)
        await desk.settle()
        return engine.started[-1].sampling

    tell(3)
    assert desk.dispatcher.count("a")[1] == 1, "its prompt is not computed yet"
    assert (await again()).prompt_logprobs_from == 4
    tell(6)
    desk.answer(engine, tokens=[7])
    sampling = await again()
    assert (sampling.HasField("prompt_logprobs_from"), sampling.max_new_tokens) == (False, 4)
    assert list(engine.started[-1].token_ids) == [*range(10), 7]
    assert sum(len(chunk.prompt_logprobs) for chunk in desk.chunks) == 9


async def test_targets_below_zero_are_rejected(desk):
    desk.model("a")
    desk.submit("r1", slo=common_pb2.Slo(tpot_ms=-1))
    await desk.settle()
    assert desk.last("r1").finish == common_pb2.REJECTED
    assert "0 and -1 ms" in desk.last("r1").error


async def test_a_prompt_beyond_the_context_is_rejected_with_both_numbers(desk):
    desk.model("a")
    desk.submit("r1", tokens=1000)
    await desk.settle()
    assert desk.last("r1").finish == common_pb2.REJECTED
    assert "1000 prompt tokens do not fit a context of 1000" in desk.last("r1").error


async def test_requests_of_a_waking_model_wait_here_and_start_when_it_is_active(desk):
    engine = desk.model("a", common_pb2.WAKING)
    desk.submit("r1", ttft_ms=60_000)
    await desk.settle()
    assert engine.started == [] and desk.dispatcher.count("a")[0] == 1
    desk.residents.set(desk.residents.get("a"), common_pb2.ACTIVE)
    await desk.settle()
    assert len(engine.started) == 1


async def test_prefills_of_two_models_without_joint_ones_start_one_by_one_the_most_urgent_first():
    desk = Desk(joint_s=0)
    running = tasks.spawn(desk.dispatcher.run(), "dispatcher")
    a, b = desk.model("a", common_pb2.WAKING), desk.model("b", common_pb2.WAKING)
    desk.submit("patient", "a", ttft_ms=9_000)
    desk.submit("urgent", "b", ttft_ms=8_000)
    for name in "ab":
        desk.residents.set(desk.residents.get(name), common_pb2.ACTIVE)
    await desk.settle()
    assert (len(a.started), len(b.started)) == (0, 1)
    desk.answer(b)
    await desk.settle()
    assert len(a.started) == 1
    await tasks.cancel(running)


async def test_prefills_of_two_models_with_short_prompts_start_side_by_side(desk):
    a, b = desk.model("a"), desk.model("b")
    desk.submit("r1", "a", ttft_ms=5000)
    desk.submit("r2", "b", ttft_ms=5000)
    await desk.settle()
    assert (len(a.started), len(b.started)) == (1, 1)


async def test_prefills_of_two_models_without_a_bound_start_side_by_side():
    desk = Desk(prefill_turn=False)
    running = tasks.spawn(desk.dispatcher.run(), "dispatcher")
    a, b = desk.model("a"), desk.model("b")
    desk.submit("r1", "a", ttft_ms=5000)
    desk.submit("r2", "b", ttft_ms=100)
    await desk.settle()
    assert (len(a.started), len(b.started)) == (1, 1)
    await tasks.cancel(running)


async def _decoding(desk, model="a", tpot_ms=16, step_ms=8.0, prefill_tokens_per_s=35_000.0):
    """A model that has a request past its first token."""
    engine = desk.model(model, common_pb2.WAKING)
    resident = desk.residents.get(model)
    resident.measured.prefill_tokens_per_s, resident.measured.decode_step_ms = prefill_tokens_per_s, step_ms
    desk.residents.set(resident, common_pb2.ACTIVE)
    desk.submit(f"{model} decodes", model, new=500, slo=common_pb2.Slo(tpot_ms=tpot_ms))
    await desk.settle()
    desk.answer(engine)
    await desk.settle()
    return engine


async def test_neighbours_prefill_is_throttled_while_a_model_decodes_and_free_once_it_ends(desk):
    b = desk.model("b")
    a = await _decoding(desk)
    desk.submit("long", "b", tokens=900)
    await desk.settle()
    throttle = desk.board.throttle(b.index)
    assert throttle.pause_ratio > 0.2 and throttle.chunk_tokens >= 128
    assert desk.board.throttle(a.index) == PrefillThrottle(step_s=0.0144), "nobody beside it decodes"
    desk.answer(a, finish=common_pb2.STOP)
    await desk.settle()
    assert desk.board.throttle(b.index) == PrefillThrottle(step_s=0.09), "without a target the default one holds"
    assert desk.board.throttle(a.index) == FREE


@pytest.mark.parametrize("end", ["cancelled", "parked", "dead"])
async def test_request_that_ends_in_any_way_throttles_no_neighbour(desk, end):
    b = desk.model("b")
    a = await _decoding(desk)
    assert desk.board.throttle(b.index) != FREE
    if end == "cancelled":
        desk.dispatcher.cancel(desk.stream, "a decodes")
    elif end == "parked":
        desk.dispatcher.on_parked(a, a.started[0].request_id)
    else:
        desk.dispatcher.on_death(a)
    await desk.settle()
    assert desk.board.throttle(b.index) == FREE


async def test_a_prefill_makes_no_pauses_for_neighbours_that_its_own_prompts_have_no_time_for(desk):
    b = desk.model("b")
    await _decoding(desk)
    desk.submit("patient", "b", tokens=100)
    await desk.settle()
    paced = desk.board.throttle(b.index)
    assert paced.slowdown > 1.2 and paced.chunk_tokens > 100, "neither is counted as longer by its pauses"
    alone_s = (100 + 100) / 2000
    desk.submit("in a hurry", "b", tokens=100, ttft_ms=round(1000 * alone_s * (1 + paced.slowdown) / 2))
    await desk.settle()
    assert len(b.started) == 2
    assert desk.board.throttle(b.index) == replace(paced, pause_ratio=0.0)
    for index in range(2):
        desk.answer(b, index)
    await desk.settle()
    assert desk.board.throttle(b.index) == paced


async def test_throttle_is_set_before_the_request_reaches_its_engine(desk):
    await _decoding(desk)
    b = desk.model("b")
    seen = []
    b.generate = lambda message: seen.append(desk.board.throttle(b.index))
    desk.submit("long", "b", tokens=900)
    await desk.settle()
    assert seen == [desk.board.throttle(b.index)] and seen[0] != FREE


async def test_target_that_is_kept_anyway_and_the_default_one_throttle_no_neighbour(desk):
    b = desk.model("b")
    a = await _decoding(desk, tpot_ms=0)
    assert desk.board.throttle(b.index) == FREE
    desk.submit("second", "a", slo=common_pb2.Slo(tpot_ms=12))
    await desk.settle()
    desk.answer(a)
    await desk.settle()
    assert desk.board.throttle(b.index) != FREE, "the tightest target of a model's requests counts"


async def test_throttle_is_not_set_where_decodes_are_not_protected():
    desk = Desk(protect_decodes=False)
    running = tasks.spawn(desk.dispatcher.run(), "dispatcher")
    b = desk.model("b")
    await _decoding(desk)
    assert desk.board.throttle(b.index) == FREE
    await tasks.cancel(running)


async def test_throttled_prefill_counts_as_long_as_it_takes_and_teaches_no_slower_speed(desk):
    b = desk.model("b")
    cost_s = await _cost_of_a_long_prompt(desk, b, "alone")
    a = await _decoding(desk, tpot_ms=12)
    paced_s = await _cost_of_a_long_prompt(desk, b, "beside")
    assert paced_s > 1.5 * cost_s
    desk.answer(a, finish=common_pb2.STOP)
    await desk.settle()
    assert await _cost_of_a_long_prompt(desk, b, "alone again") == pytest.approx(cost_s)


async def _cost_of_a_long_prompt(desk, engine, request_id):
    """Seconds that the plan counts for it; it then takes exactly as long."""
    desk.submit(request_id, "b", tokens=900)
    await desk.settle()
    desk.dispatcher.changed()
    await desk.settle()
    seconds = desk.dispatcher.queue_state().busy_s
    desk.time += seconds
    desk.answer(engine, finish=common_pb2.STOP)
    await desk.settle()
    return seconds


async def test_steps_that_miss_their_target_beside_a_prefill_lengthen_its_pauses(desk):
    b = desk.model("b")
    a = await _decoding(desk)
    desk.submit("long", "b", tokens=900)
    await desk.settle()
    before = desk.board.throttle(b.index)
    for _ in range(WINDOW + 1):
        desk.time += 0.030
        desk.answer(a)
    desk.dispatcher.changed()
    await desk.settle()
    assert desk.board.throttle(b.index).pause_ratio > before.pause_ratio > 0


async def test_rest_of_a_long_prefill_shrinks_with_what_its_engine_reports(desk):
    a = desk.model("a")
    desk.submit("long", tokens=900, ttft_ms=60_000)
    await desk.settle()
    desk.dispatcher.changed()
    await desk.settle()
    whole_s = desk.dispatcher.queue_state().busy_s
    assert whole_s > 0
    prompt = engine_pb2.Prefilled.Prompt(request_id=a.started[0].request_id, cached_tokens=300, computed_tokens=0)
    desk.dispatcher.on_prefilled(a, [prompt])
    await desk.settle()
    assert desk.dispatcher.queue_state().busy_s == pytest.approx(whole_s * 600 / 900)
    prompt.computed_tokens = 450
    desk.dispatcher.on_prefilled(a, [prompt])
    await desk.settle()
    assert desk.dispatcher.queue_state().busy_s == pytest.approx(whole_s * 150 / 900)
    desk.answer(a)
    desk.dispatcher.on_prefilled(a, [prompt])  # of a step that was under way: it says nothing any more
    await desk.settle()
    assert desk.dispatcher.queue_state().busy_s == 0


async def test_a_late_request_is_kept_and_served(desk):
    engine = desk.model("a")
    desk.submit("late", tokens=900, ttft_ms=1)
    await desk.settle()
    assert len(engine.started) == 1


async def test_a_late_request_is_dropped_only_if_its_client_asked(desk):
    desk.model("a")
    desk.submit("late", tokens=900, ttft_ms=1, slo=common_pb2.Slo(drop_late=True))
    await desk.settle()
    assert desk.last("late").finish == common_pb2.LATE
    assert desk.dispatcher.count("a") == (0, 0, 0)


async def test_cold_start_time_of_a_model_is_known_when_it_comes_back_as_a_new_one(desk):
    desk.model("a")
    desk.residents.get("a").cold_s = 0.5
    desk.residents.set(desk.residents.get("a"), common_pb2.COLD)
    desk.residents.leave(desk.residents.get("a"))
    desk.model("a", common_pb2.WAKING)
    desk.submit("in time", ttft_ms=1000, slo=common_pb2.Slo(drop_late=True))
    desk.submit("never", ttft_ms=400, slo=common_pb2.Slo(drop_late=True))
    await desk.settle()
    assert desk.last("never").finish == common_pb2.LATE
    assert desk.dispatcher.count("a")[0] == 1


async def test_cancelled_request_is_aborted_at_its_engine_and_sends_nothing_more(desk):
    engine = desk.model("a")
    desk.submit("r1")
    await desk.settle()
    desk.dispatcher.cancel(desk.stream, "r1")
    desk.answer(engine)
    await desk.settle()
    assert engine.aborted == [engine.started[0].request_id] and desk.chunks == []


async def test_the_end_of_a_gateways_stream_cancels_all_of_its_requests(desk):
    engine = desk.model("a")
    desk.submit("r1")
    desk.submit("r2")
    await desk.settle()
    desk.dispatcher.cancel_stream(desk.stream)
    await desk.settle()
    assert len(engine.aborted) == 2 and desk.dispatcher.count("a") == (0, 0, 0)


async def test_a_dead_engine_fails_its_requests_retryably_and_keeps_those_that_wait(desk):
    engine = desk.model("a")
    desk.submit("runs")
    await desk.settle()
    desk.residents.set(desk.residents.get("a"), common_pb2.WAKING)
    desk.submit("waits")
    desk.dispatcher.on_death(engine)
    await desk.settle()
    assert desk.last("runs").finish == common_pb2.FAILED
    assert [chunk.request_id for chunk in desk.chunks] == ["runs"]
    assert desk.deaths == [engine] and desk.dispatcher.count("a")[0] == 1


async def test_a_parked_request_starts_again_with_what_it_had_generated(desk):
    engine = desk.model("a")
    desk.submit("r1", new=5)
    await desk.settle()
    desk.answer(engine, tokens=[50, 51])
    desk.dispatcher.on_parked(engine, engine.started[0].request_id)
    await desk.settle()
    again = engine.started[1]
    assert list(again.token_ids) == [*range(10), 50, 51] and again.resumed_tokens == 2
    assert again.sampling.max_new_tokens == 3
    with capture_logs() as lines:
        desk.answer(engine, tokens=[52])
    (line,) = (line for line in lines if line["event"] == "stream paused")
    assert (line["request_id"], line["model"], line["reason"]) == ("r1", "a", "no KV memory")
    assert (line["emitted"], line["outcome"], line["log_level"]) == (2, "resumed", "info") and line["ms"] >= 0


@pytest.mark.parametrize("outcome", ["resumed", "ended here"])
async def test_dispatcher_request_retracted_by_its_engine_logs_one_pause(desk, outcome):
    engine = desk.model("a")
    desk.submit("r1/2", new=5)
    await desk.settle()
    desk.answer(engine, tokens=[50, 51])
    with capture_logs() as lines:
        for reason in ("KV memory over its limit", "no KV memory for the running batch"):
            desk.dispatcher.on_retracted(engine, engine.started[0].request_id, reason)
            desk.time += 0.25
        if outcome == "resumed":
            desk.answer(engine, tokens=[52])
            desk.answer(engine, tokens=[53])
        else:
            desk.dispatcher.on_death(engine)
    (line,) = (line for line in lines if line["event"] == "stream paused")
    assert (line["request_id"], line["model"], line["reason"]) == ("r1", "a", "KV memory over its limit")
    assert (line["ms"], line["emitted"], line["outcome"], line["log_level"]) == (500.0, 2, outcome, "info")


async def test_a_stream_that_met_its_target_is_not_dropped_for_being_late_when_it_was_parked(desk):
    engine = desk.model("a")
    slo = common_pb2.Slo(drop_late=True)
    desk.submit("said something", new=5, ttft_ms=9_000, slo=slo)
    desk.submit("said nothing", tokens=11, new=5, ttft_ms=9_000, slo=slo)
    await desk.settle()
    desk.answer(engine, 0, tokens=[50])
    state = balloond_pb2.DeviceState(device="cpu:0", capacity_bytes=1000, free_bytes=0)
    state.bookings.add(model="a", limit_bytes=1000)
    desk.memory.update([state])
    await desk.settle()
    for started in list(engine.started):
        desk.dispatcher.on_parked(engine, started.request_id)
    desk.time += 10
    desk.dispatcher.changed()
    await desk.settle()
    assert desk.last("said nothing").finish == common_pb2.LATE
    assert desk.dispatcher.count("a") == (1, 0, 1) and not desk.last("said something").finish


async def test_request_parked_while_its_model_leaves_is_handed_back_at_once(desk):
    engine = desk.model("a")
    desk.submit("r1", new=5)
    await desk.settle()
    desk.residents.set(desk.residents.get("a"), common_pb2.DRAINING)
    desk.dispatcher.hand_back("a")
    with capture_logs() as lines:
        desk.dispatcher.on_parked(engine, engine.started[0].request_id)
    assert [line["outcome"] for line in lines if line["event"] == "stream paused"] == ["ended here"]
    await desk.settle()
    last = desk.last("r1")
    assert (last.finish, last.error) == (common_pb2.FAILED, "not here")
    assert desk.dispatcher.count("a") == (0, 0, 0)


async def test_tokens_of_a_resumed_request_count_as_output_also_when_it_is_parked_again(desk):
    engine = desk.model("a")
    desk.submit("r1", tokens=10, new=5, resumed_tokens=4)
    await desk.settle()
    assert engine.started[0].resumed_tokens == 4
    desk.answer(engine, tokens=[50])
    desk.dispatcher.on_parked(engine, engine.started[0].request_id)
    await desk.settle()
    assert engine.started[1].resumed_tokens == 5 and engine.started[1].sampling.max_new_tokens == 4


@pytest.mark.parametrize("came", [False, True])
async def test_streams_whose_kv_came_with_the_model_start_together_and_not_one_by_one(came):
    desk = Desk(chunk_tokens=16, joint_s=0)
    running = tasks.spawn(desk.dispatcher.run(), "dispatcher")
    engine = desk.model("a")
    if came:
        desk.brought.came("a", [range(36)], desk.time)
    for number in range(4):
        desk.submit(f"r{number}", tokens=40, new=5, resumed_tokens=4)
    await desk.settle()
    await tasks.cancel(running)
    assert len(engine.started) == (4 if came else 1)


async def test_streams_that_follow_their_model_one_by_one_start_together(desk):
    engine = desk.model("a")
    await desk.settle()
    desk.brought.came("a", [range(36)], desk.time)
    both, generate = asyncio.Event(), engine.generate

    def started(message):
        generate(message)
        if len(engine.started) == 2:
            both.set()

    engine.generate = started
    desk.submit("r1", tokens=40, new=5, resumed_tokens=4)
    await desk.settle()
    assert engine.started == []
    desk.submit("r2", tokens=40, new=5, resumed_tokens=4)
    await desk.settle()
    assert engine.started == []
    for begin in desk.due:
        begin()
    async with asyncio.timeout(PATIENCE_S):
        await both.wait()


async def test_kv_reserved_for_running_answers_counts_as_a_shortage_once_it_lasts(desk):
    engine = desk.model("a")
    state = balloond_pb2.DeviceState(device="cpu:0", capacity_bytes=1000, free_bytes=900)
    state.bookings.add(model="a", limit_bytes=1000)
    desk.memory.update([state])
    for name in ("runs", "waits"):
        desk.submit(name, tokens=20, new=30)
    await desk.settle()
    assert len(engine.started) == 1 and [need.bytes for need in desk.needs] == [50 * 10]
    assert desk.dispatcher.lacking_bytes("a") == 0, "it has just been asked for"
    desk.time += LASTING_S
    assert desk.dispatcher.lacking_bytes("a") == 2 * 50 * 10 - 900
    desk.answer(engine, finish=common_pb2.STOP)
    await desk.settle()
    assert len(engine.started) == 2 and desk.dispatcher.lacking_bytes("a") == 0


async def test_request_without_memory_asks_for_room_and_starts_when_there_is_some(desk):
    engine = desk.model("a")
    state = balloond_pb2.DeviceState(device="cpu:0", capacity_bytes=1000, free_bytes=20)
    state.bookings.add(model="a", limit_bytes=1000)
    desk.memory.update([state])
    desk.submit("r1", tokens=20, new=5, ttft_ms=9_000)
    await desk.settle()
    assert engine.started == []
    assert [(need.model, need.bytes) for need in desk.needs] == [("a", 25 * 10)]
    state.free_bytes = 500
    desk.memory.update([state])
    desk.dispatcher.changed()
    await desk.settle()
    assert len(engine.started) == 1


@pytest.mark.parametrize("granted", [True, False])
async def test_memory_is_requested_once_and_a_plan_follows_if_it_was_granted(desk, granted):
    engine = desk.model("a")
    state = balloond_pb2.DeviceState(device="cpu:0", capacity_bytes=1000, free_bytes=20)
    state.bookings.add(model="a", limit_bytes=1000)
    desk.memory.update([state])
    desk.submit("r1", tokens=20, new=5, ttft_ms=9_000)
    await desk.settle()
    desk.dispatcher.changed()
    await desk.settle()
    (request,) = desk.requested
    assert (request.model, request.bytes) == ("a", 25 * 10)
    state.free_bytes = 500
    desk.memory.update([state])
    desk.dispatcher.memory_answered(request, granted)
    await desk.settle()
    assert len(engine.started) == granted


async def test_memory_need_follows_the_output_forecast_which_is_a_setting_until_a_request_ended():
    desk = Desk(forecast_tokens=8, forecast_weight=1.0)
    running = tasks.spawn(desk.dispatcher.run(), "dispatcher")
    engine = desk.model("a")
    state = balloond_pb2.DeviceState(device="cpu:0", capacity_bytes=1000, free_bytes=20)
    state.bookings.add(model="a", limit_bytes=1000)
    desk.memory.update([state])
    desk.submit("r1", tokens=20, new=50)
    await desk.settle()
    assert [need.bytes for need in desk.needs] == [(20 + 8) * 10]
    state.free_bytes = 500
    desk.memory.update([state])
    desk.dispatcher.changed()
    await desk.settle()
    desk.answer(engine, tokens=range(30), finish=common_pb2.STOP)
    state.free_bytes = 20
    desk.memory.update([state])
    desk.submit("r2", tokens=20, new=50)
    await desk.settle()
    assert [need.bytes for need in desk.needs][1:] == [(20 + 30) * 10]
    await tasks.cancel(running)


async def test_memory_that_neighbours_hold_idle_counts_as_room(desk):
    engine = desk.model("a")
    state = balloond_pb2.DeviceState(device="cpu:0", capacity_bytes=1000, free_bytes=0)
    state.bookings.add(model="a", limit_bytes=1000)
    state.bookings.add(model="b", limit_bytes=1000, floor_bytes=100)
    state.leases.add(model="b", kv_bytes=900, kv_used_bytes=100, kv_cached_bytes=700, kv_reserve_bytes=100)
    desk.memory.update([state])
    desk.submit("r1", tokens=20, new=5, ttft_ms=9_000)
    await desk.settle()
    assert len(engine.started) == 1


async def test_a_hit_target_and_a_missed_one_are_counted(desk):
    engine = desk.model("a")
    for request_id, waited in (("hit", 0.5), ("missed", 2.0)):
        desk.submit(request_id, ttft_ms=1_000)
        await desk.settle()
        desk.time += waited
        desk.answer(engine, finish=common_pb2.STOP)
        await desk.settle()
    model = desk.dispatcher.model("a")
    assert (model.ttft_met, model.ttft_missed) == (1, 1)


async def test_an_embedding_counts_as_its_prompt_and_its_vector_as_a_first_token(desk):
    engine = desk.model("e")
    desk.submit("r1", "e", tokens=1000, ttft_ms=500, embed=True)
    await desk.settle()
    assert engine.started[0].embed
    assert desk.dispatcher.model("e").committed == 1000 * 10
    vector = common_pb2.TokenChunk(
        request_id=engine.started[0].request_id, embedding=[0.6, 0.8], finish=common_pb2.STOP
    )
    desk.dispatcher.on_tokens(engine, [vector])
    await desk.settle()
    assert list(desk.last("r1").embedding) == pytest.approx([0.6, 0.8])
    model = desk.dispatcher.model("e")
    assert (model.ttft_met, desk.dispatcher.all_requests()) == (1, 0)
    assert model.rate.rate(desk.time) > 0


@pytest.mark.parametrize(
    ("model", "tokens", "embed", "why"),
    [
        ("a", 10, True, "model 'a' makes text and no embeddings"),
        ("e", 10, False, "model 'e' makes embeddings and no text"),
        ("e", 1001, True, "1001 prompt tokens do not fit a context of 1000"),
        ("e", 0, True, "0 prompt tokens"),
        ("a", 1000, False, "1000 prompt tokens do not fit a context of 1000"),
    ],
)
async def test_request_that_its_model_cannot_serve_is_refused(desk, model, tokens, embed, why):
    engine = desk.model(model)
    desk.submit("r1", model, tokens=tokens, embed=embed)
    await desk.settle()
    assert desk.last("r1").finish == common_pb2.REJECTED and why in desk.last("r1").error
    assert not engine.started


async def test_metrics_of_models_that_left_are_kept_for_the_last_ones_only(desk):
    for number in range(200):
        desk.model(f"m{number}")
        desk.submit(f"r{number}", f"m{number}")
        await desk.settle()
        desk.answer(desk.engines[f"m{number}"], finish=common_pb2.LENGTH)
        await desk.settle()
        counters.ACTIVATION.labels(f"m{number}", "engine").observe(1.0)
        counters.STALLED.labels(f"m{number}").inc()
        desk.residents.leave(desk.residents.get(f"m{number}"))
    for metric in (counters.STARTED, counters.ACTIVATION, counters.STALLED):
        told = {sample.labels["model"] for family in metric.collect() for sample in family.samples}
        assert "m199" in told and "m0" not in told
    desk.model("m0")
    desk.submit("again", "m0")
    await desk.settle()
    assert len(desk.engines["m0"].started) == 1


async def test_request_beyond_what_its_engine_runs_waits_behind_one_that_can_be_on_time(desk):
    engine = desk.model("a", common_pb2.WAKING)
    desk.residents.get("a").measured.most_running = 2
    desk.residents.set(desk.residents.get("a"), common_pb2.ACTIVE)
    for name in ("first", "second", "third"):
        desk.submit(name)
    await desk.settle()
    assert len(engine.started) == 2
    desk.submit("in time", ttft_ms=2000)
    await desk.settle()
    assert len(engine.started) == 2
    desk.answer(engine, 0, finish=common_pb2.LENGTH)
    await desk.settle()
    assert [started.request_id.partition("/")[2] for started in engine.started] == ["1", "2", "4"]
    desk.answer(engine, 2, finish=common_pb2.LENGTH)
    await desk.settle()
    assert [started.request_id.partition("/")[2] for started in engine.started] == ["1", "2", "4", "3"]


async def test_first_request_of_a_model_and_the_end_of_its_last_are_reported_at_once(desk):
    engine = desk.model("a")
    desk.model("b", common_pb2.WAKING)
    for number in range(3):
        desk.submit(f"{number}")
    desk.submit("other", "b")
    await desk.settle()
    assert len(desk.turns) == 2, "who has one already is as busy with another"
    for _ in range(3):
        desk.answer(engine, 0, finish=common_pb2.LENGTH)
        engine.started.pop(0)
    desk.dispatcher.cancel(desk.stream, "other")
    assert [(turn["a"], turn["b"]) for turn in desk.turns[2:]] == [((0, 0), (1, 0)), ((0, 0), (0, 0))]


async def test_gateway_is_told_what_a_new_request_of_each_active_model_meets(desk):
    desk.model("a")
    desk.model("b", common_pb2.WAKING)
    desk.submit("1", tokens=400, ttft_ms=60_000)
    await desk.settle()
    desk.submit("2", tokens=600, ttft_ms=60_000)
    await desk.settle()
    desk.dispatcher.outlook_news.follow(desk.stream, True)
    message = desk.stream.take()
    (told,) = message.outlook.models
    assert (told.model, told.requests) == ("a", 2)
    assert told.queue_s == pytest.approx(1000 / told.tokens_per_s)


async def test_request_whose_kv_went_to_another_group_ends_with_that_groups_address(desk):
    engine = desk.model("a")
    for name in ("1", "2"):
        desk.submit(name)
    await desk.settle()
    desk.dispatcher.go_on_at([engine.started[0].request_id, "nobody's"], "unix:/other")
    for index in (0, 1):
        desk.answer(engine, index)
        desk.answer(engine, index, finish=common_pb2.FAILED)
    await desk.settle()
    assert [desk.last(name).kv_address for name in ("1", "2")] == ["unix:/other", ""]
    assert [chunk.kv_address for chunk in desk.chunks if not chunk.finish] == ["", ""]
