"""Short prompts beside the prefill that has the turn: who would be late for nothing but the wait for it."""

from __future__ import annotations

from math import inf

from hypothesis import given, settings
from hypothesis import strategies as st

from gpu_scheduler.policy.queue.admission import CANDIDATES, AdmissionMemory, ModelKv, PrefillLimits, admit
from gpu_scheduler.policy.queue.backlog import Backlog
from gpu_scheduler.policy.queue.decisions import NeedMemory, Start, StartRule
from gpu_scheduler.policy.queue.slack import PrefillSpeed, WaitingRequest

SPEED = 1024.0
MODELS = ("a", "b", "c", "d")
LIMITS = PrefillLimits(chunk_tokens=512, joint_s=0.3)
PLENTY = AdmissionMemory({model: ModelKv(limit=1 << 40, held=0) for model in MODELS})


def backlog() -> Backlog:
    queue = Backlog()
    for model in MODELS:
        queue.add_model(model, PrefillSpeed(SPEED))
        queue.model_active(model)
    return queue


def add(queue: Backlog, request_id: str, model: str, seconds: float, deadline: float = inf, now: float = 0.0) -> None:
    queue.add(WaitingRequest(request_id, model, now, now + deadline, round(seconds * SPEED)), now)


def under_way(queue: Backlog, request_id: str, model: str, seconds: float, deadline: float = inf) -> None:
    add(queue, request_id, model, seconds, deadline)
    queue.start(Start(request_id, StartRule.ON_TIME), 0.0)


def decide(
    queue: Backlog, memory: AdmissionMemory = PLENTY, limits: PrefillLimits = LIMITS
) -> list[Start | NeedMemory]:
    return admit(queue.plan(0.0), queue, memory, limits)


def test_short_prompt_that_only_the_wait_makes_late_goes_beside_a_long_one() -> None:
    queue = backlog()
    under_way(queue, "long", "a", 1.0, deadline=5.0)
    add(queue, "short", "b", 0.1, deadline=0.25)
    assert decide(queue) == [Start("short", StartRule.BESIDE)]


def test_short_prompt_that_can_wait_does_not_go_beside_a_long_one() -> None:
    queue = backlog()
    under_way(queue, "long", "a", 1.0, deadline=5.0)
    add(queue, "short", "b", 0.1, deadline=2.0)
    add(queue, "no hurry", "c", 0.1)
    assert decide(queue) == []


def test_short_prompt_that_is_late_beside_a_long_one_too_waits() -> None:
    queue = backlog()
    under_way(queue, "long", "a", 1.0, deadline=5.0)
    add(queue, "short", "b", 0.1, deadline=0.19)
    assert decide(queue) == []


def test_short_prompt_waits_where_the_long_one_would_be_late_by_it() -> None:
    queue = backlog()
    under_way(queue, "long", "a", 1.0, deadline=1.05)
    add(queue, "short", "b", 0.1, deadline=0.5)
    assert decide(queue) == []


def test_short_prompt_waits_where_another_timely_request_would_be_late_by_it() -> None:
    queue = backlog()
    under_way(queue, "long", "a", 1.0, deadline=5.0)
    add(queue, "on time", "c", 0.5, deadline=1.55)
    add(queue, "short", "b", 0.1, deadline=0.5)
    assert decide(queue) == []


def test_long_prompt_that_is_late_already_lets_a_short_one_go_beside_it() -> None:
    queue = backlog()
    under_way(queue, "late", "a", 1.0, deadline=0.5)
    add(queue, "short", "b", 0.1, deadline=0.25)
    assert decide(queue) == [Start("short", StartRule.BESIDE)]


def test_short_prompt_of_the_same_engine_does_not_go_beside_its_long_one() -> None:
    queue = backlog()
    under_way(queue, "long", "a", 1.0, deadline=5.0)
    add(queue, "short", "a", 0.1, deadline=0.25)
    assert decide(queue) == []


def test_short_prompts_beside_a_long_one_take_no_more_together_than_those_sharing_the_turn() -> None:
    queue = backlog()
    under_way(queue, "long", "a", 2.0, deadline=9.0)
    for model in "bcd":
        add(queue, model, model, 0.14, deadline=0.9)
    assert decide(queue) == [Start("b", StartRule.BESIDE), Start("c", StartRule.BESIDE)]


def test_short_prompt_beside_a_long_one_takes_the_slack_from_the_next() -> None:
    queue = backlog()
    under_way(queue, "long", "a", 1.0, deadline=1.15)
    for model in "bc":
        add(queue, model, model, 0.1, deadline=0.5)
    assert decide(queue) == [Start("b", StartRule.BESIDE)]


def test_short_prompt_beside_a_long_one_is_not_made_late_by_the_next() -> None:
    queue = backlog()
    under_way(queue, "long", "a", 1.0, deadline=5.0)
    add(queue, "b", "b", 0.1, deadline=0.25)
    add(queue, "c", "c", 0.1, deadline=0.5)
    assert decide(queue) == [Start("b", StartRule.BESIDE)]


def test_short_prompt_without_memory_goes_beside_no_other() -> None:
    queue = backlog()
    under_way(queue, "long", "a", 1.0, deadline=5.0)
    add(queue, "short", "b", 0.1, deadline=0.25)
    memory = AdmissionMemory({model: ModelKv(limit=0, held=0) for model in MODELS})
    assert not [decision for decision in decide(queue, memory) if isinstance(decision, Start)]


def test_prefill_under_way_keeps_its_slack_while_its_engine_says_nothing() -> None:
    queue = backlog()
    under_way(queue, "long", "a", 1.0, deadline=1.05)
    for now in (0.04, 0.06, 0.5):
        add(queue, f"short at {now}", "b", 0.1, deadline=0.25, now=now)
        assert admit(queue.plan(now), queue, PLENTY, LIMITS) == []


def test_memory_and_places_of_the_next_requests_are_not_taken_by_prompts_beside_a_long_one() -> None:
    queue = backlog()
    under_way(queue, "long", "a", 1.0, deadline=5.0)
    add(queue, "on time", "b", 0.2, deadline=2.0)
    add(queue, "short", "b", 0.1, deadline=0.25)
    assert decide(queue) == [Start("short", StartRule.BESIDE)]
    for more, starts in ((0, []), (103, [Start("short", StartRule.BESIDE)])):
        models = {**PLENTY.models, "b": ModelKv(limit=205 + more, held=0)}
        assert decide(queue, AdmissionMemory(models)) == starts
    for places, starts in ((1, []), (2, [Start("short", StartRule.BESIDE)])):
        assert admit(queue.plan(0.0), queue, PLENTY, LIMITS, {"b": places}) == starts


def test_old_request_without_memory_is_not_overtaken_by_a_short_one_of_its_model() -> None:
    queue = backlog()
    under_way(queue, "long", "a", 1.0, deadline=5.0)
    add(queue, "old", "b", 1.0)
    add(queue, "short", "b", 0.1, deadline=0.25)
    models = {**PLENTY.models, "b": ModelKv(limit=1000, held=0)}
    assert not [decision for decision in decide(queue, AdmissionMemory(models)) if isinstance(decision, Start)]


def test_requests_of_the_prefilling_engine_do_not_hide_a_short_prompt_of_another() -> None:
    queue = backlog()
    under_way(queue, "long", "a", 2.0, deadline=9.0)
    for number in range(2 * CANDIDATES):
        add(queue, f"{number}", "a", 0.1, deadline=0.2)
    add(queue, "short", "b", 0.1, deadline=0.25)
    assert decide(queue) == [Start("short", StartRule.BESIDE)]


def test_short_prompt_waits_where_one_engine_prefills_at_a_time() -> None:
    queue = backlog()
    under_way(queue, "long", "a", 1.0, deadline=5.0)
    add(queue, "short", "b", 0.1, deadline=0.25)
    assert decide(queue, limits=PrefillLimits(chunk_tokens=512)) == []


def shared_equally(work: list[tuple[str, str, float]]) -> dict[str, float]:
    """When each of (id, model, seconds alone) ends if models share the devices equally, each doing its own in turn."""
    lines: dict[str, list[tuple[str, float]]] = {}
    for request_id, model, seconds in work:
        lines.setdefault(model, []).append((request_id, seconds))
    now, ends = 0.0, dict[str, float]()
    while lines:
        step = min(line[0][1] for line in lines.values())
        now += step * len(lines)
        for model, line in list(lines.items()):
            request_id, seconds = line.pop(0)
            if seconds > step:
                line.insert(0, (request_id, seconds - step))
            else:
                ends[request_id] = now
            if not line:
                del lines[model]
    return ends


PROMPTS = st.tuples(st.sampled_from(MODELS), st.integers(1, 2048), st.floats(0.01, 6.0))
EXACT_S = 1e-6


@settings(max_examples=400)
@given(st.lists(PROMPTS, min_size=1, max_size=4), st.lists(PROMPTS, min_size=1, max_size=8))
def test_short_prompts_beside_a_long_one_are_on_time_and_make_no_other_late(
    first: list[tuple[str, int, float]], then: list[tuple[str, int, float]]
) -> None:
    queue = backlog()
    work, deadlines = list[tuple[str, str, float]](), dict[str, float]()
    for number, (model, tokens, deadline) in enumerate(first):
        name = f"under way {number}"
        under_way(queue, name, model, tokens / SPEED, deadline)
        work.append((name, model, tokens / SPEED))
        deadlines[name] = deadline
    for number, (model, tokens, deadline) in enumerate(then):
        add(queue, f"{number}", model, tokens / SPEED, deadline)
        deadlines[f"{number}"] = deadline
    before = shared_equally(work)
    queue_plan = queue.plan(0.0)
    s = [queue.request(request_id) for request_id in queue_plan.on_time]
    joined = [
        d.request_id
        for d in admit(queue_plan, queue, PLENTY, LIMITS)
        if isinstance(d, Start) and d.why is StartRule.BESIDE
    ]
    for request_id in joined:
        request = queue.request(request_id)
        work.append((request_id, request.model, request.prompt_tokens / SPEED))
    after = shared_equally(work)
    for name in before:
        assert after[name] <= deadlines[name] + EXACT_S or before[name] > deadlines[name] - EXACT_S
    assert all(after[request_id] <= deadlines[request_id] + EXACT_S for request_id in joined)
    ends = max(after.values())
    for request in s:
        ends += request.prompt_tokens / SPEED
        assert ends <= request.deadline + EXACT_S
