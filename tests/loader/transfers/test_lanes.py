"""Copies over several links, each with a thread: lanes here are a test's, which says when they end and how."""

import threading
from dataclasses import dataclass

import pytest

from loader.copies.threads import Stopped
from loader.transfers.lanes import Lanes
from testing.patience import PATIENCE_S

A, B, C = "cpu:0", "cpu:1", "cpu:2"


@dataclass(frozen=True)
class Part:
    number: int
    nbytes: int = 1


PLAN = [Part(number) for number in range(20)]


class StandIn:
    """A lane whose work is begun at once and done when the test lets it go on."""

    def __init__(self):
        self.begun = threading.Semaphore(0)
        self.gate = threading.Event()
        self.gate.set()
        self.under_way = 0
        self.fails_to_open = False
        self.fails_to_begin = False
        self.fails_to_finish = False
        self.closed = threading.Event()

    def open(self):
        if self.fails_to_open:
            raise OSError(12, "no memory for a context")

    def begin(self, move):
        if self.fails_to_begin:
            raise OSError(5, "no such stream")
        self.under_way += 1
        try:
            move(None)
        except BaseException:
            self.under_way -= 1
            raise
        self.begun.release()

    def finish(self):
        assert self.gate.wait(PATIENCE_S)
        self.under_way -= 1
        if self.fails_to_finish:
            raise OSError(5, "the device failed")

    def close(self):
        self.closed.set()


@pytest.fixture
def stand_ins():
    return {name: StandIn() for name in (A, B, C)}


def lanes(stand_ins, window=2, **keys):
    return Lanes(stand_ins.__getitem__, window, **keys)


def test_parts_are_prepared_in_order_before_they_move_and_reported_after(stand_ins):
    prepared, moved, told = [], [], []

    def move(part, stream):
        assert part in prepared
        moved.append(part)

    def done(part):
        assert part in moved
        told.append(part)

    lanes(stand_ins).carry([A, B], PLAN, prepare=prepared.append, move=move, done=done)
    assert prepared == PLAN
    assert sorted(moved, key=lambda part: part.number) == sorted(told, key=lambda part: part.number) == PLAN


def test_parts_over_one_link_arrive_in_order(stand_ins):
    told = []
    lanes(stand_ins).carry([A], PLAN, move=lambda part, stream: None, done=told.append)
    assert told == PLAN


def test_links_work_at_the_same_time_each_with_a_full_window(stand_ins):
    for name in (A, B):
        stand_ins[name].gate.clear()
    told = []
    enough = threading.Event()  # what both windows take is there

    def prepare(part):
        if part.number == 7:
            enough.set()

    def move(part, stream):
        assert enough.wait(PATIENCE_S)

    copy = threading.Thread(
        target=lanes(stand_ins, window=3).carry,
        args=([A, B], PLAN),
        kwargs={"prepare": prepare, "move": move, "done": told.append},
    )
    copy.start()
    for name in (A, B):
        for _ in range(3):
            assert stand_ins[name].begun.acquire(timeout=PATIENCE_S)
        assert not stand_ins[name].begun.acquire(blocking=False)
    assert not told
    for name in (A, B):
        stand_ins[name].gate.set()
    copy.join(PATIENCE_S)
    assert len(told) == len(PLAN)


@pytest.mark.parametrize("how", ["fails_to_open", "fails_to_begin", "fails_to_finish"])
def test_parts_of_a_failing_link_go_over_the_others(stand_ins, how):
    setattr(stand_ins[A], how, True)
    told = []
    lanes(stand_ins).carry([A, B], PLAN, move=lambda part, stream: None, done=told.append)
    assert sorted(told, key=lambda part: part.number) == PLAN


@pytest.mark.parametrize("how", ["fails_to_open", "fails_to_begin", "fails_to_finish"])
def test_failure_of_the_last_link_is_raised_by_the_copy(stand_ins, how):
    for name in (A, B):
        setattr(stand_ins[name], how, True)
    told = []
    carrying = lanes(stand_ins)
    with pytest.raises(OSError, match="no memory for a context|no such stream|the device failed"):
        carrying.carry([A, B], PLAN, move=lambda part, stream: None, done=told.append)
    assert not told
    carrying.carry([C], PLAN, move=lambda part, stream: None, done=told.append)
    assert told == PLAN


def test_a_fault_of_the_move_itself_ends_the_copy_too(stand_ins):
    def move(part, stream):
        raise ValueError("a released view")

    with pytest.raises(ValueError, match="a released view"):
        lanes(stand_ins).carry([A, B], PLAN, move=move, done=lambda part: None)


def test_a_cancelled_copy_ends_when_no_link_moves_any_of_it(stand_ins):
    slow = stand_ins[B]
    slow.gate.clear()
    slow_has_some = threading.Event()
    ended = threading.Event()

    def move(part, stream):
        if threading.current_thread().name == f"link {B}":
            slow_has_some.set()
        assert slow_has_some.wait(PATIENCE_S)

    def done(part):
        raise Stopped

    def copy():
        with pytest.raises(Stopped):
            lanes(stand_ins).carry([A, B], PLAN, move=move, done=done)
        ended.set()

    thread = threading.Thread(target=copy)
    thread.start()
    assert stand_ins[A].closed.wait(PATIENCE_S)  # the copy was cancelled: the link has nobody to work for
    assert not ended.is_set() and slow.under_way
    slow.gate.set()
    assert ended.wait(PATIENCE_S) and not slow.under_way
    thread.join()


def test_a_failing_preparation_ends_the_copy_and_leaves_nothing_under_way(stand_ins):
    def prepare(part):
        if part.number == 5:
            raise OSError(12, "no memory")

    with pytest.raises(OSError, match="no memory"):
        lanes(stand_ins).carry([A, B], PLAN, prepare=prepare, move=lambda part, stream: None, done=lambda part: None)
    assert not any(lane.under_way for lane in stand_ins.values())


def test_copies_sharing_a_link_both_progress(stand_ins):
    stand_ins[A].gate.clear()
    carrying = lanes(stand_ins, window=1)
    order = []
    arrived = threading.Barrier(2)

    def copy(name):
        arrived.wait(PATIENCE_S)
        carrying.carry([A], PLAN, move=lambda part, stream: order.append(name), done=lambda part: None)

    threads = [threading.Thread(target=copy, args=(name,)) for name in "xy"]
    for thread in threads:
        thread.start()
    assert stand_ins[A].begun.acquire(timeout=PATIENCE_S)
    stand_ins[A].gate.set()
    for thread in threads:
        thread.join(PATIENCE_S)
    assert order.count("x") == order.count("y") == len(PLAN)


def test_copies_to_different_devices_at_once_keep_to_their_own_links(stand_ins):
    """And a link that moves a part carried the copy when the part was prepared: extents are mapped for it then."""
    carrying = lanes(stand_ins)
    both = threading.Barrier(2)
    moved_by = {"x": set(), "y": set()}
    allowed = {"x": {}, "y": {}}

    def copy(name, links):
        told = []
        carries = []

        def opened(links_now):
            carries.append(links_now)
            assert links[0] in links_now()
            both.wait(PATIENCE_S)  # the other has begun as well

        def prepare(part):
            allowed[name][part] = carries[0]()

        def move(part, stream):
            link = threading.current_thread().name.removeprefix("link ")
            assert link in allowed[name][part]
            moved_by[name].add(link)

        carrying.carry(links, PLAN, opened=opened, prepare=prepare, move=move, done=told.append)
        assert sorted(told, key=lambda part: part.number) == PLAN
        assert carries[0]() == (), "it is over"
        ended.append(name)

    ended = []
    threads = [threading.Thread(target=copy, args=arguments) for arguments in (("x", [A, B]), ("y", [B, A]))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_S)
    assert sorted(ended) == ["x", "y"]
    assert moved_by == {"x": {A}, "y": {B}}


def test_a_copy_that_began_alone_leaves_another_its_own_link(stand_ins):
    carrying = lanes(stand_ins, window=1)
    second_began, second_ended = threading.Event(), threading.Event()
    links_then, by = [], []

    def move(part, stream):
        by.append((part.number, threading.current_thread().name))

    def prepare(part):
        if part.number == 10:
            second_began.set()
            assert second_ended.wait(PATIENCE_S)

    def second():
        assert second_began.wait(PATIENCE_S)
        carrying.carry([B, A], PLAN, move=lambda part, stream: None, done=lambda part: None)
        second_ended.set()

    thread = threading.Thread(target=second)
    thread.start()
    carrying.carry(
        [A, B],
        PLAN,
        prepare=prepare,
        move=move,
        done=lambda part: None,
        opened=lambda links: links_then.append(links()),
    )
    thread.join(PATIENCE_S)
    assert links_then == [(A, B)]
    assert {name for number, name in by if number >= 10} == {f"link {A}"}


def test_links_go_on_while_the_caller_handles_arrived_parts(stand_ins):
    told = []

    def done(part):
        if not told:
            for _ in range(9):  # the window when the first were told, as much again, and one that waits
                assert stand_ins[A].begun.acquire(timeout=PATIENCE_S)
        told.append(part)

    lanes(stand_ins, window=4).carry([A], PLAN, move=lambda part, stream: None, done=done)
    assert told == PLAN


def test_link_threads_keep_the_share_of_a_busy_link(stand_ins):
    moved = []
    carrying = lanes(stand_ins, window=1, busy=lambda links: {A: 0.75})
    plan = [Part(number) for number in range(200)]
    by_thread = {}

    def move(part, stream):
        moved.append(part)
        name = threading.current_thread().name
        by_thread[name] = by_thread.get(name, 0) + 1

    carrying.carry([A, B], plan, move=move, done=lambda part: None)
    assert len(moved) == 200
    assert by_thread.get(f"link {A}", 0) <= 0.25 * by_thread[f"link {B}"]


def test_copy_over_one_link_does_not_query_how_busy_it_is(stand_ins):
    asked = []
    carrying = lanes(stand_ins, busy=lambda links: asked.append(tuple(links)) or {})
    for links in ([A], [A, B]):
        carrying.carry(links, PLAN, move=lambda part, stream: None, done=lambda part: None)
    assert asked == [(A, B)]


def test_a_links_thread_lives_while_copies_go_over_it(stand_ins):
    carrying = lanes(stand_ins)
    for _ in range(2):
        carrying.carry([A, B], PLAN, move=lambda part, stream: None, done=lambda part: None)
        for name in (A, B):
            assert stand_ins[name].closed.wait(PATIENCE_S)
            stand_ins[name].closed.clear()
    assert not stand_ins[C].closed.is_set()
