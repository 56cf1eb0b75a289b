from math import inf

from loader.policy.looks import LookSchedule


def test_looks_at_a_failed_model_back_off_to_half_a_minute():
    looks, now, at = LookSchedule(), 100.0, []
    for _ in range(8):
        looks.failed("m", now)
        assert looks.take_due(looks.next_at() - 0.01) == []
        now = looks.next_at()
        at.append(now)
        assert looks.take_due(now) == ["m"] and looks.next_at() == inf, "it is being looked at"
    assert [after - before for before, after in zip([100.0, *at], at, strict=False)] == [1, 2, 4, 8, 16, 30, 30, 30]


def test_looks_at_files_that_change_come_soon_again():
    looks = LookSchedule()
    for now in (0.0, 10.0, 20.0):
        looks.failed("m", now)
    assert looks.pause_s("m") == 4.0
    looks.failed("m", 30.0, anew=True)
    assert looks.pause_s("m") == 1.0 and looks.next_at() == 31.0


def test_model_that_can_be_served_has_no_look_scheduled():
    looks = LookSchedule()
    looks.failed("m", 0.0)
    looks.failed("n", 5.0)
    looks.forget("m")
    assert looks.pause_s("m") == 0.0 and looks.next_at() == 6.0 and looks.take_due(100.0) == ["n"]
