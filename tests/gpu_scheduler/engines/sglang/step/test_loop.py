"""What an engine does between two steps, over stand-ins for SGLang and its memory."""

from __future__ import annotations

import pytest

from tests.gpu_scheduler.engines.sglang.forks import Imported

pytestmark = pytest.mark.sglang
SCRIPT = """
from unittest.mock import MagicMock
from gpu_scheduler.engines.sglang.step.loop import StepLoop
from gpu_scheduler.engines.sglang.policy.agreement import StepAgreement
from gpu_scheduler.engines.sglang.model.stats import EngineCounters

class Ranks:
    # Of several: what was agreed on holds until the next messages are received.
    rank, size, agreed = 0, 2, StepAgreement()
    def now(self):
        return 100.0
    def pace(self):
        return None
    pace_now = pace
    def decodes(self, requests, need, wanting):
        pass
    def decode_step(self, own_s):
        return own_s

ranks, instance = Ranks(), MagicMock()
agreements = [StepAgreement(news=True, wanted=7), StepAgreement()]

def receive():
    ranks.agreed = agreements.pop(0)
    return []

instance.ranks, instance.probe, instance.decode_step_s = ranks, None, 0.0
instance.channel.receive, instance.channel.closed = receive, False
scheduler, memory, kv = instance.scheduler, instance.memory.kv, instance.kv
scheduler.waiting_queue, scheduler.chunked_req, scheduler.last_batch = ["waits for its turn"], None, None
scheduler.tree_cache.root_node.children, scheduler.tree_cache.evictable_size.return_value = {}, 0
type(memory).woken = property(lambda _: ranks.agreed.news)
memory.take_reclaims = lambda: ranks.agreed.wanted
memory.overage_bytes.return_value, memory.extent_bytes, kv.leaving.return_value, kv.used = 0, 1, 7, 0
kv.give_up_empties.return_value = 7
instance.counters = EngineCounters()

StepLoop(instance).pull()
memory.reclaimed.assert_called_once()
kv.give_up_empties.assert_called()
instance.channel.wait.assert_not_called()
"""


def test_what_others_want_is_seen_to_before_a_stalled_engine_waits_for_its_turn(imported: Imported) -> None:
    """Or the next agreement takes its place, and whoever wants it waits in vain."""
    imported.run(SCRIPT)


PAUSES = """
from unittest.mock import MagicMock
from gpu_scheduler.engines.sglang.step import loop as module
from gpu_scheduler.engines.sglang.policy.agreement import StepAgreement
from gpu_scheduler.engines.sharing.throttle import PrefillThrottle

class Clock:
    now = 100.0
    def monotonic(self):
        return self.now
    def wait(self, seconds, fds):
        self.now += seconds

class Ranks:
    rank, size, agreed = 0, 1, StepAgreement()
    def now(self):
        return clock.now
    def pace(self):
        return PrefillThrottle(128, 2.0)
    pace_now = pace
    told = None
    def decodes(self, requests, need, wanting):
        self.told = need, wanting
    def decode_step(self, own_s):
        return own_s

clock, instance = Clock(), MagicMock()
module.time = clock
instance.ranks, instance.probe, instance.decode_step_s = Ranks(), None, 0.0
instance.channel.receive, instance.channel.closed, instance.channel.wait = lambda: [], False, clock.wait
scheduler, memory, kv = instance.scheduler, instance.memory.kv, instance.kv
scheduler.waiting_queue, scheduler.last_batch = ["a long prompt"], None
memory.woken, memory.overage_bytes.return_value = False, 0
instance.options.park_after_ms = 1e9

loop = module.StepLoop(instance)
loop._commands, loop._giving, loop._tell = MagicMock(), MagicMock(), MagicMock()
loop._commands.tick.return_value, loop._commands.next_deadline_s.return_value = [], None
began = []
loop.pacer.look(clock.now)
for _ in range(4):
    began.append(round(clock.now, 2))
    loop.pacer.began()
    clock.now += 1.0
    loop.pacer.ended()
    loop.pull()
assert began == [100.0, 103.0, 106.0, 109.0], began
"""


def test_a_pause_is_as_long_as_the_step_before_asks_for_and_not_what_was_waited_before_that(imported: Imported) -> None:
    imported.run(PAUSES)


PATIENCE = (
    PAUSES.split("loop = module.StepLoop(instance)")[0]
    + """
instance.options.park_after_ms = 200

def parked_after(probe, headroom):
    loop = module.StepLoop(instance)
    loop._commands, loop._giving, loop._tell, loop._park = MagicMock(), MagicMock(), MagicMock(), MagicMock()
    loop._commands.tick.return_value, loop._commands.next_deadline_s.return_value = [], None
    instance.ranks.pace = instance.ranks.pace_now = lambda: module.FREE
    instance.probe, kv.memory.headroom.return_value = probe, headroom
    began = clock.now
    while not loop._park.called:
        loop.pull()
        assert clock.now < began + 60
    return round(clock.now - began, 1)

def probe(proves):
    return MagicMock(proves=proves, next_requests=lambda: [])

assert parked_after(None, headroom=3) == 0.2
assert parked_after(probe(True), headroom=3) == 5.0
assert parked_after(probe(True), headroom=0) == 0.2, "its limit does not allow more"
assert parked_after(probe(False), headroom=3) == 0.2, "the model is proven"
"""
)


def test_a_probe_waits_longer_than_requests_for_memory_that_its_limit_allows(imported: Imported) -> None:
    imported.run(PATIENCE)


ENDS = """
from unittest.mock import MagicMock
from gpu_scheduler.engines.sglang.hooks.loop import next_batch

def asked(*to_finish, waiting=(), extend=False, overlap=True, last=True):
    \"\"\"Whether SGLang is asked for the next batch.\"\"\"
    scheduler, running, before = MagicMock(), MagicMock(), MagicMock()
    scheduler.enable_overlap, scheduler.waiting_queue, scheduler.chunked_req = overlap, list(waiting), None
    running.reqs = [MagicMock(to_finish=reason) for reason in to_finish]
    before.forward_mode.is_decode.return_value = not extend
    original = MagicMock()
    plan = next_batch(original, scheduler, running_batch=running, last_batch=before if last else None)
    if not original.called:
        assert plan.batch_to_run is None and plan.running_batch is running
    return original.called

assert not asked("stopped") and not asked("stopped", "stopped")
assert asked("stopped", None), "one goes on"
assert asked("stopped", waiting=["another"])
assert asked("stopped", extend=True), "what was prefilled has yet to join those that run"
assert asked("stopped", last=False), "no results are on their way: SGLang has to let go of them"
assert asked("stopped", overlap=False)
assert asked()
"""


def test_no_step_is_begun_whose_requests_all_end_with_the_results_of_the_last(imported: Imported) -> None:
    imported.run(ENDS)


PING = """
from unittest.mock import MagicMock
from gpu_scheduler.engines.sglang.step.loop import StepLoop
from gpu_scheduler.engines.sglang.model.stats import EngineCounters
from gpu_scheduler.engines.sharing.throttle import FREE
from protos import engine_pb2

instance = MagicMock()
instance.probe, instance.ranks.size, instance.channel.closed, instance.decode_step_s = None, 1, False, 0.0
instance.ranks.now.return_value, instance.ranks.pace.return_value = 100.0, FREE
instance.channel.receive.return_value = [engine_pb2.ToEngine(ping=engine_pb2.Ping())]
instance.memory.kv, instance.counters = None, EngineCounters()

assert StepLoop(instance).pull() == []
instance.channel.send.assert_any_call(pong=engine_pb2.Pong())
"""


def test_an_engine_answers_where_it_reads_its_socket(imported: Imported) -> None:
    imported.run(PING)


WAY = (
    PAUSES.split("loop = module.StepLoop(instance)")[0]
    .replace("PrefillThrottle(128, 2.0)", "PrefillThrottle(128, 1.0)")
    .replace(
        "    pace_now = pace\n",
        "    pace_now = pace\n    def gives_way_now(self):\n        return clock.now < way_is_free\n",
    )
    + """
loop = module.StepLoop(instance)
loop._commands, loop._giving, loop._tell = MagicMock(), MagicMock(), MagicMock()
loop._commands.tick.return_value, loop._commands.next_deadline_s.return_value = [], None
way_is_free, scheduler.chunked_req = 200.0, None
request = MagicMock(to_finish=None)
request.finished.return_value = False
scheduler.running_batch.reqs = [request]
loop.pacer.look(clock.now)
loop.pacer.began()
clock.now += 1.0
loop.pacer.ended()
loop._gave_way = True
loop.pull()
assert 102.0 <= clock.now < 102.01, clock.now

scheduler.waiting_queue, way_is_free = [], 150.0
loop._gave_way = True
loop.pull()
assert 150.0 <= clock.now < 150.01, clock.now
loop.pull()
assert clock.now < 150.01, "it gave way once"
"""
)


def test_an_engine_that_gives_way_goes_on_when_the_pause_before_its_own_prefill_ends(imported: Imported) -> None:
    """And that pause is as long as the step before asks for, not what it gave way for."""
    imported.run(WAY)


OVER = (
    WAY.split("way_is_free, scheduler")[0]
    + """
way_is_free, scheduler.chunked_req, scheduler.waiting_queue = 200.0, None, []
instance.decode_step_s = 0.005
loop.pacer.look(clock.now, PrefillThrottle(step_s=0.008))
module.StepLoop._pace = lambda loop: PrefillThrottle(step_s=0.008)
runs, over = MagicMock(to_finish=None, output_ids=[7]), MagicMock(to_finish=None, output_ids=[7])
instance.request_table.by_rid.return_value.first_at = None
runs.finished.return_value, over.finished.return_value = False, True
scheduler.running_batch.reqs = [over, runs]
way_is_free, loop._gave_way = clock.now + 1.0, True
told = []
clock.wait = lambda seconds, fds: (told.append(instance.ranks.told), setattr(clock, "now", clock.now + seconds))[2:]
instance.channel.wait = clock.wait
seen = clock.now
loop.pull()
assert clock.now >= way_is_free and instance.ranks.told[0] == 0.625, instance.ranks.told
assert told[0] == (0.625, True), "its first token is seen before it stands still"
assert instance.request_table.by_rid.return_value.first_at == seen

scheduler.running_batch.reqs = [over]
began, way_is_free, loop._gave_way = clock.now, clock.now + 1.0, True
loop.pull()
assert clock.now == began and instance.ranks.told == (None, False), instance.ranks.told

scheduler.running_batch.reqs = [runs]
loop.pull()
assert instance.ranks.told[0] == 0.625
loop.sleep()
assert instance.ranks.told == (None, False)
"""
)


def test_a_batch_in_which_nothing_goes_on_waits_for_nobody_and_nobody_for_it(imported: Imported) -> None:
    """Requests that are over stay in it until the next step is formed."""
    imported.run(OVER)


RESULTS = """
from collections import deque
from types import SimpleNamespace
from unittest.mock import MagicMock, call, patch
from gpu_scheduler.engines.sglang.base import current
from gpu_scheduler.engines.sglang.hooks import loop as hooks_loop
from gpu_scheduler.engines.sglang.step.current import set_loop
from gpu_scheduler.engines.sglang.step.loop import StepLoop

instance = MagicMock()
instance.ranks.size, instance.ranks.now.return_value = 1, 100.0
loop = StepLoop(instance)
set_loop(loop)
ranks = instance.ranks

def batch(prefill):
    return SimpleNamespace(forward_mode=SimpleNamespace(is_extend=lambda: prefill))

def first(now, last, there=True, sglang=False):
    copied = there if there is None else SimpleNamespace(query=lambda: there)
    scheduler = SimpleNamespace(result_queue=deque([(last, SimpleNamespace(copy_done=copied))] if last else []))
    with patch.object(current, "instance", lambda: instance):
        return hooks_loop.results_first(lambda *_: sglang, scheduler, now, last)

prefill, decode = batch(True), batch(False)
assert first(prefill, prefill)
for now, last in ((decode, prefill), (prefill, decode), (None, prefill), (prefill, None)):
    assert not first(now, last)
assert not first(prefill, prefill, there=False) and not first(prefill, prefill, there=None)
assert first(decode, decode, sglang=True), "SGLang has reasons of its own"
ranks.size = 2
assert not first(prefill, prefill)

# What goes before decodes of other engines does so between the two as well.
ranks.size = 1
scheduler = instance.scheduler
scheduler.waiting_queue, scheduler.running_batch.reqs = ["behind them"] * 3, ["decodes"]
slots = 4  # of requests that run: one prompt of those that wait finds one
scheduler.get_num_allocatable_reqs = lambda running: slots - running
loop.prefill_begins(2)
assert first(prefill, prefill)
loop.prefill_ended()
assert ranks.claim.call_args_list == [call(3), call(3)] and not ranks.release.called
slots = 2
loop.prefill_begins(2)
assert ranks.claim.call_args == call(2), "more requests than slots take nothing from those in the step"
assert not first(decode, prefill)
loop.prefill_ended()
assert ranks.release.call_count == 1
"""


def test_results_that_are_there_go_out_before_another_prefill_step_is_launched(imported: Imported) -> None:
    imported.run(RESULTS)


SLOW_PROBE = """
from unittest.mock import MagicMock
from gpu_scheduler.engines.sglang.step import loop as module
from gpu_scheduler.engines.sglang.model.instance import Instance
from gpu_scheduler.engines.sglang.base.states import EngineState
from gpu_scheduler.engines.sharing.throttle import PrefillThrottle
from protos import engine_pb2

# What it was measured with does not matter here; what it thinks a step takes does.
instance = MagicMock(_measured=engine_pb2.Measured(decode_step_ms=40.0), probe=None, state=EngineState.PROVING)
type(instance).decode_step_s = Instance.decode_step_s
instance.decodes_within = lambda seconds: Instance.decodes_within(instance, seconds)
now, pace, told = 100.0, PrefillThrottle(step_s=0.020), []
ranks = instance.ranks
ranks.size, ranks.now, ranks.pace, ranks.decode_step = 1, lambda: now, lambda: pace, lambda own: own
ranks.decodes = lambda requests, need, wanting: told.append((need, wanting))
ranks.alone.return_value = ranks.gives_way.return_value = False
loop = module.StepLoop(instance)
request = MagicMock(to_finish=None, output_ids=[7])
request.finished.return_value = False
instance.request_table.by_rid.return_value.first_at = None
batch = MagicMock(reqs=[request])

def steps(count, seconds):
    global now
    for _ in range(count):
        loop.pacer.look(now, pace)
        loop.gives_way(batch)
        loop.decode_begins()
        loop.decode_ended()
        now += seconds

steps(20, 0.001)
assert instance.decode_step_s == 0.040, "that was the probe, or of another model"
instance.state = EngineState.ACTIVE
steps(10, 0.012)
assert told[-1] == (2.0, False), "its target seems out of reach"
steps(20, 0.012)
instance.request_table.by_rid.return_value.first_at = None
now += 0.1
loop.gives_way(batch)
assert 0.012 <= instance.decode_step_s < 0.013, instance.decode_step_s
assert told[-1] == (instance.decode_step_s / 0.020, True), "what has just got its first token makes it want to be first"
steps(40, 0.030)
assert instance.decode_step_s < 0.013, "slower ones say nothing"
"""


def test_an_engine_whose_step_was_measured_beside_busy_ones_learns_that_it_keeps_its_target(imported: Imported) -> None:
    """Or it would ask for nothing, and its requests be late, for as long as it lives."""
    imported.run(SLOW_PROBE)
