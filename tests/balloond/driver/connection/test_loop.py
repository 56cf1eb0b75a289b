import contextlib
import os
import socket
import threading

from balloond.driver.connection.loop import DescriptorLoop
from tests.balloond.conftest import TIMEOUT_S


def wait(event):
    assert event.wait(TIMEOUT_S)


def test_descriptor_loop_calls_run_on_its_thread_in_order():
    loop, seen, done = DescriptorLoop("test"), [], threading.Event()
    for number in range(100):
        loop.call(lambda number=number: seen.append((number, loop.here())))
    loop.call(done.set)
    loop.start()
    wait(done)
    assert seen == [(number, True) for number in range(100)]
    assert not loop.here()
    loop.stop()
    loop.join(TIMEOUT_S)
    assert not loop.alive


def test_descriptor_loop_call_from_its_own_thread_runs_too():
    loop, done = DescriptorLoop("test"), threading.Event()
    loop.start()
    loop.call(lambda: loop.call(lambda: loop.call(done.set)))
    wait(done)
    loop.stop()


def test_descriptor_loop_delayed_calls_run_in_the_order_of_their_times():
    loop, seen, done = DescriptorLoop("test"), [], threading.Event()

    def plan():
        loop.later(0.02, lambda: seen.append("second"))
        loop.later(0.01, lambda: seen.append("first"))
        loop.later(0.03, done.set)

    loop.call(plan)
    loop.start()
    wait(done)
    assert seen == ["first", "second"]
    loop.stop()


def test_descriptor_loop_calls_reader_and_writer_of_a_ready_descriptor():
    loop, seen, done = DescriptorLoop("test"), [], threading.Event()
    here, there = socket.socketpair()
    here.setblocking(False)
    there.setblocking(False)

    def until_it_blocks(what):
        with contextlib.suppress(BlockingIOError):
            while True:
                what()

    def fill():
        until_it_blocks(lambda: here.send(bytes(1 << 16)))
        loop.add_writer(here.fileno(), writable)
        loop.add_reader(here.fileno(), readable)
        there.send(b"x")

    def readable():
        seen.append(here.recv(1))
        loop.remove_reader(here.fileno())
        until_it_blocks(lambda: there.recv(1 << 20))

    def writable():
        seen.append(b"writable")
        loop.remove_writer(here.fileno())
        done.set()

    loop.call(fill)
    loop.start()
    wait(done)
    loop.stop()
    loop.join(TIMEOUT_S)
    assert seen == [b"x", b"writable"]


def test_descriptor_loop_calls_a_reader_until_it_is_removed():
    loop, seen, done = DescriptorLoop("test"), [], threading.Event()
    reads, writes = os.pipe()

    def readable():
        seen.append(os.read(reads, 1))
        if len(seen) == 2:
            loop.remove_reader(reads)
            loop.call(done.set)

    loop.call(lambda: loop.add_reader(reads, readable))
    loop.start()
    os.write(writes, b"xyz")
    wait(done)
    assert seen == [b"x", b"y"]
    loop.stop()
    loop.join(TIMEOUT_S)
    os.close(reads)
    os.close(writes)
