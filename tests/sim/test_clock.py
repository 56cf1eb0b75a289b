from sim.clock import Clock


def test_events_run_in_order_of_time_and_of_one_moment_in_order_of_scheduling():
    clock, seen = Clock(), []
    for name, when in (("c", 2.0), ("a", 1.0), ("d", 2.0), ("b", 1.0)):
        clock.at(when, seen.append, name)
    assert clock.run() is False
    assert seen == ["a", "b", "c", "d"] and clock.now == 2.0


def test_an_event_of_the_same_moment_comes_after_those_that_were_scheduled_before_it():
    clock, seen = Clock(), []
    clock.at(1.0, lambda: (seen.append("first"), clock.after(0.0, seen.append, "third")))
    clock.at(1.0, seen.append, "second")
    clock.run()
    assert seen == ["first", "second", "third"]


def test_cancelled_event_does_not_run_and_one_in_the_past_runs_now():
    clock, seen = Clock(), []
    clock.at(1.0, seen.append, "gone").cancel()
    clock.at(2.0, lambda: clock.at(0.5, seen.append, clock.now))
    clock.run()
    assert seen == [2.0] and clock.now == 2.0


def test_clock_run_stops_at_its_end_and_goes_on_from_there():
    clock, seen = Clock(), []
    clock.at(1.0, seen.append, 1)
    clock.at(3.0, seen.append, 3)
    assert clock.run(until=2.0) is True and seen == [1] and clock.now == 2.0
    assert clock.run(until=3.0) is False and seen == [1, 3]
