from gpu_scheduler.policy.decisions import NeedMemory
from gpu_scheduler.policy.lack import LASTING_S, Lack


def need(model, nbytes):
    return NeedMemory(model, nbytes, f"of {model}", 1.0)


def test_what_plan_after_plan_lacks_is_told_and_what_one_has_is_not():
    lack = Lack()
    lack.look([need("a", 100)], 10.0)
    assert lack.of("a", 10.0) == 0, "it may be there with the next report"
    lack.look([need("a", 60), need("b", 7)], 10.0 + LASTING_S)
    assert (lack.of("a", 10.0 + LASTING_S), lack.of("b", 10.0 + LASTING_S)) == (60, 0)
    lack.look([need("b", 7)], 10.0 + 2 * LASTING_S)
    assert (lack.of("a", 10.0 + 2 * LASTING_S), lack.of("b", 10.0 + 2 * LASTING_S)) == (0, 7)
    lack.look([need("a", 60)], 11.0)
    assert (lack.of("a", 11.0), lack.of("b", 11.0), lack.of("never asked for", 11.0)) == (0, 0, 0)


def test_it_is_told_in_time_without_another_plan():
    lack = Lack()
    lack.look([need("a", 100)], 10.0)
    assert lack.of("a", 10.0 + LASTING_S) == 100
