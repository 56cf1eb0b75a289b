"""Links take work as they have room: all of it once, fairly between copies, sparing busy devices."""

from dataclasses import dataclass

from hypothesis import given
from hypothesis import strategies as st

from loader.policy.links import Links

A, B, C = "cuda:0", "cuda:1", "cuda:2"


@dataclass(frozen=True)
class Bytes:
    """Work of copy `copy`, its number `number`."""

    copy: int
    number: int
    nbytes: int


def works(copy, sizes):
    return [Bytes(copy, number, nbytes) for number, nbytes in enumerate(sizes)]


class World:
    """Links that are asked and finish in any order; what each carried, and what was under way at most."""

    def __init__(self, window):
        self.window = window
        self.links = Links(window)
        self.under_way = {}
        self.carried = {}
        self.finished = []
        self.dead = set()

    def open(self, copy, names, sizes, busy=None):
        self.links.open(copy, names, sum(sizes), busy)
        for work in works(copy, sizes):
            self.links.offer(copy, work)
        for name in names:
            self.under_way.setdefault(name, [])

    def take(self, link):
        taken = self.links.take(link)
        if taken is None:
            return None
        copy, work = taken
        assert work.copy == copy
        self.under_way[link].append(work)
        self.carried[copy, link] = self.carried.get((copy, link), 0) + work.nbytes
        together = sum(work.nbytes for work in self.under_way[link])
        assert together <= self.window or len(self.under_way[link]) == 1
        return work

    def finish(self, link):
        work = self.under_way[link].pop(0)
        self.links.done(link, work.copy, work)
        self.finished.append(work)

    def fail(self, link):
        work = self.under_way[link].pop(0)
        return self.links.failed(link, work.copy, work)

    def step(self, link):
        """One thing that the link can do; False when there is none."""
        if self.take(link) is None:
            if not self.under_way[link]:
                return False
            self.finish(link)
        return True

    def run(self, names):
        """To the end, the links in turns."""
        while any([self.step(name) for name in names]):
            pass


SIZES = st.lists(st.integers(1, 20), min_size=1, max_size=30)
BUSY = st.dictionaries(st.sampled_from([A, B, C]), st.floats(0, 1), max_size=3)


@given(copies=st.lists(SIZES, min_size=1, max_size=3), window=st.integers(0, 40), busy=BUSY, data=st.data())
def test_links_do_every_chunk_once_in_any_order_and_none_exceeds_its_window(copies, window, busy, data):
    world = World(window)
    for number, sizes in enumerate(copies):
        names = data.draw(st.lists(st.sampled_from([A, B, C]), min_size=1, max_size=3, unique=True))
        world.open(number, names, sizes, busy)
    names = list(world.under_way)
    for name in data.draw(st.lists(st.sampled_from(names), max_size=60)):
        world.step(name)
    world.run(names)
    expected = [work for number, sizes in enumerate(copies) for work in works(number, sizes)]
    assert sorted(world.finished, key=lambda work: (work.copy, work.number)) == expected


@given(sizes=SIZES, window=st.integers(0, 40), failing=st.lists(st.sampled_from([B, C]), max_size=8), data=st.data())
def test_chunks_of_a_failed_link_are_done_by_the_others(sizes, window, failing, data):
    world = World(window)
    world.open(0, [A, B, C], sizes)
    for name in failing:
        world.take(name)
        world.step(data.draw(st.sampled_from([A, B, C])))
        if world.under_way[name]:
            assert world.fail(name)
            assert world.take(name) is None
    world.run([A, B, C])
    assert sorted(world.finished, key=lambda work: work.number) == works(0, sizes)


def test_failure_of_the_last_link_is_reported():
    world = World(100)
    world.open(0, [A, B], [1, 2, 3, 4])
    for name in (A, A, B):
        world.take(name)
    assert world.fail(A)
    assert not world.fail(B)
    assert not world.fail(A)  # what it had beside; nothing is left to hand it to


def test_a_link_that_failed_one_copy_carries_the_others():
    world = World(100)
    world.open(0, [A], [1])
    world.open(1, [A], [2])
    world.take(A)
    assert not world.fail(A)
    assert world.take(A) == Bytes(1, 0, 2)


def test_link_that_leaves_before_its_first_chunk_is_not_waited_for():
    world = World(1)
    world.open(0, [A, B], [1] * 3, {B: 1.0})
    assert world.links.leave(A, 0) and world.links.users(A) == ()
    world.run([A, B])
    assert world.carried == {(0, B): 3}
    world.open(1, [A], [1])
    assert not world.links.leave(A, 1)


def test_a_link_that_is_twice_as_fast_carries_twice_as_much():
    world = World(2)
    world.open(0, [A, B], [1] * 300)
    while any([world.step(name) for name in (A, A, B)]):
        pass
    assert abs(world.carried[0, A] - 2 * world.carried[0, B]) <= 4


@given(sizes=st.lists(st.integers(1, 9), min_size=2, max_size=4), window=st.integers(0, 40))
def test_copies_over_one_link_take_turns(sizes, window):
    """Copies of equal length and unequal chunks: none is ever two chunks ahead of another that has some left."""
    world = World(window)
    for number, nbytes in enumerate(sizes):
        world.open(number, [A], [nbytes] * 20)
    taken = [0] * len(sizes)
    while (work := world.take(A)) or world.under_way[A]:
        if work is None:
            world.finish(A)
            continue
        taken[work.copy] += 1
        assert max(taken) - min(taken) <= 1


def test_a_copy_that_comes_later_has_every_second_turn_at_once():
    world = World(0)
    world.open(0, [A], [1] * 10)
    for _ in range(4):
        world.take(A)
        world.finish(A)
    world.open(1, [A], [1] * 3)
    turns = []
    while (work := world.take(A)) is not None:
        turns.append(work.copy)
        world.finish(A)
    assert turns == [0, 1, 0, 1, 0, 1, 0, 0, 0]


@given(
    sizes=st.lists(st.integers(1, 20), min_size=1, max_size=60),
    busy=st.floats(0.01, 1),
    window=st.integers(0, 60),
    order=st.lists(st.sampled_from([A, B, C]), max_size=150),
)
def test_a_busy_link_carries_at_most_its_share_while_there_are_free_ones(sizes, busy, window, order):
    world = World(window)
    world.open(0, [A, B, C], sizes, {A: busy})

    def within():
        most = max(world.carried.get((0, B), 0), world.carried.get((0, C), 0))
        return world.carried.get((0, A), 0) <= (1 - busy) * most

    for name in order:
        world.step(name)
        assert within()
    world.run([A, B, C])
    assert within() and len(world.finished) == len(sizes)


def test_a_busy_link_leaves_the_end_to_the_free_ones():
    world = World(0)
    world.open(0, [A, B], [1] * 10, {A: 0.1})
    for _ in range(8):
        assert world.take(B)
        world.finish(B)
    assert world.take(A)  # two are left, and B would do them one after the other
    world.finish(A)
    assert world.take(A) is None  # its share is not used up, but B would do the last one as soon
    assert world.take(B)


def test_a_link_that_is_busy_all_the_time_carries_nothing_while_there_is_a_free_one():
    world = World(10)
    world.open(0, [A, B], [1] * 100, {A: 1.0})
    world.run([A, B])
    assert (0, A) not in world.carried and len(world.finished) == 100


def test_copy_whose_links_are_all_busy_goes_over_the_least_busy():
    world = World(10)
    world.open(0, [A, B], [1] * 100, {A: 1.0, B: 0.9})
    world.run([A, B])
    assert (0, A) not in world.carried and len(world.finished) == 100


def test_a_busy_link_takes_over_when_the_free_one_fails():
    world = World(0)
    world.open(0, [A, B], [1] * 10, {A: 1.0})
    world.take(B)
    assert world.take(A) is None
    assert world.fail(B)
    world.run([A, B])
    assert world.carried[0, A] == 10


def test_withdrawn_copy_has_no_more_chunks_handed_out():
    world = World(100)
    world.open(0, [A], [1] * 4)
    world.open(1, [A], [1])
    world.take(A)
    world.links.withdraw(0)
    assert world.links.under_way(0) == 1
    assert world.take(A).copy == 1 and world.take(A) is None
    assert not world.fail(A)
    assert world.take(A) is None and world.links.under_way(0) == 0
    world.links.close(0)
    assert world.links.users(A) == (1,)
    world.finish(A)
    world.links.close(1)
    assert world.links.users(A) == ()


def test_copies_to_different_devices_begun_at_once_keep_to_their_own_links():
    world = World(window=1)
    world.open(1, [A, B], [10] * 4)
    world.open(2, [B, A], [10] * 2)
    assert (world.links.of(1), world.links.of(2)) == ((A,), (B,))
    world.run([A, B])
    assert world.carried == {(1, A): 40, (2, B): 20}


def test_a_copy_that_is_alone_has_all_links_until_one_is_anothers_own():
    world = World(window=1)
    world.open(1, [A, B, C], [10] * 12)
    for name in (A, B, C):
        world.take(name)
        world.finish(name)
    world.take(B)
    world.open(2, [B, A, C], [10] * 4)
    assert (world.links.of(1), world.links.of(2)) == ((A, C), (B, C))
    assert world.take(B) is None, "what it has of the first is under way, and its window full"
    world.finish(B)
    assert world.take(B).copy == 2
    world.run([A, B, C])
    assert world.carried[1, B] == 20 and len(world.finished) == 16


def test_a_link_that_was_left_does_not_come_back_to_the_copy_but_the_next_has_all_again():
    world = World(window=1)
    world.open(1, [A, B], [10] * 4)
    world.open(2, [B, A], [10])
    world.run([B])
    world.links.close(2)
    assert world.links.of(1) == (A,) and world.take(B) is None
    world.run([A, B])
    world.links.close(1)
    world.open(3, [B, A], [10] * 4)
    assert world.links.of(3) == (B, A)


def test_copies_to_one_device_share_all_its_links():
    world = World(window=1)
    world.open(1, [A, B], [10] * 20)
    world.open(2, [A, B], [10] * 20)
    assert world.links.of(1) == world.links.of(2) == (A, B)
    world.run([A, B])
    assert world.carried == {(1, A): 100, (2, A): 100, (1, B): 100, (2, B): 100}


def test_a_copy_that_loses_its_free_links_goes_over_its_own_busy_one():
    world = World(window=1)
    world.open(1, [A, B], [10] * 4, {A: 1.0})
    assert world.links.spares(1) and world.take(A) is None
    world.open(2, [B, A], [10] * 4)
    assert not world.links.spares(1)
    world.run([A, B])
    assert world.carried == {(1, A): 40, (2, B): 40}


def test_link_of_a_withdrawn_copy_is_free_for_others():
    world = World(window=1)
    world.open(1, [A], [10] * 2)
    world.take(A)
    world.links.withdraw(1)
    world.open(2, [B, A], [10] * 2)
    assert world.links.of(2) == (B, A)


NAMES = st.lists(st.sampled_from([A, B, C]), min_size=1, max_size=3, unique=True)


@given(opens=st.lists(st.tuples(NAMES, SIZES), min_size=2, max_size=5), busy=BUSY, data=st.data())
def test_copies_never_use_the_own_link_of_another_and_all_of_them_end(opens, busy, data):
    """Copies begin while others run: each keeps its own link, has none that is another's own, gets none back that it
    left, and ends."""
    world = World(window=0)
    had, own = {}, {}
    for number, (names, sizes) in enumerate(opens):
        world.open(number, names, sizes, busy)
        own[number] = names[0]
        for other, before in had.items():
            assert set(world.links.of(other)) <= before
        for copy in own:
            had[copy] = set(world.links.of(copy))
            others = {own[other] for other in own} - {own[copy]}
            assert own[copy] in had[copy] and not had[copy] & others
        for name in data.draw(st.lists(st.sampled_from([A, B, C]), max_size=10)):
            if name in world.under_way:
                world.step(name)
    world.run(list(world.under_way))
    expected = [work for number, (_, sizes) in enumerate(opens) for work in works(number, sizes)]
    assert sorted(world.finished, key=lambda work: (work.copy, work.number)) == expected


def test_a_copy_whose_own_link_failed_has_its_turns_on_the_others():
    world = World(window=1)
    world.open(1, [A, B], [10] * 4)
    world.take(A)
    assert world.fail(A)
    world.open(2, [B], [10] * 4)
    world.run([B])
    assert [work.copy for work in world.finished] == [1, 2, 1, 2, 1, 2, 1, 2]
