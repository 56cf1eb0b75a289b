from services.runtime.pauses import Pauses


def test_pauses_double_up_to_the_longest_each_by_its_name():
    pauses = Pauses(1.0, 30.0)
    assert [pauses.failed("a") for _ in range(7)] == [1, 2, 4, 8, 16, 30, 30]
    assert pauses.failed("b") == 1
    assert [pauses.present_s(name) for name in "abc"] == [30, 1, 0]


def test_pauses_of_a_forgotten_name_begin_anew():
    pauses = Pauses(1.0, 30.0)
    for name in "aab":
        pauses.failed(name)
    pauses.forget("a")
    pauses.forget("nobody")
    assert pauses.present_s("a") == 0 and pauses.failed("a") == 1
    pauses.keep_only({"a"})
    assert pauses.present_s("b") == 0 and pauses.present_s("a") == 1
