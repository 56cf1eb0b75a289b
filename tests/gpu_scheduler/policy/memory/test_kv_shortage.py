from gpu_scheduler.policy.memory.kv_shortage import LASTING_S, KvShortages
from gpu_scheduler.policy.queue.decisions import NeedMemory

WAIT = {"a": 3, "b": 1}
NOW = 10.0


def need(model, lacking, nbytes=1000):
    return NeedMemory(model, nbytes, f"of {model}", 1.0, lacking)


def test_kv_shortage_found_by_plan_after_plan_is_reported_and_one_of_a_single_plan_is_not():
    lack = KvShortages()
    lack.look([need("a", 100)], WAIT, NOW)
    assert lack.of("a", NOW) == 0, "it may be there with the next report"
    lack.look([need("a", 60), need("b", 7)], WAIT, NOW + LASTING_S)
    assert (lack.of("a", NOW + LASTING_S), lack.of("b", NOW + LASTING_S)) == (60, 0)
    assert lack.of("never asked for", NOW + LASTING_S) == 0


def test_kv_shortage_is_reported_in_time_without_another_plan():
    lack = KvShortages()
    lack.look([need("a", 100)], WAIT, NOW)
    assert lack.of("a", NOW + LASTING_S) == 100


def test_kv_shortage_survives_one_plan_without_it_and_ends_after_several():
    lack = KvShortages()
    lack.look([need("a", 100)], WAIT, NOW)
    lack.look([], WAIT, NOW + 0.09)
    assert lack.of("a", NOW + LASTING_S) == 0, "nobody has found it for so long"
    lack.look([need("a", 100)], WAIT, NOW + 0.095)
    lack.look([need("a", 100)], WAIT, NOW + 0.12)
    lack.look([], WAIT, NOW + 0.13)
    assert lack.of("a", NOW + 0.13) == 100
    lack.look([], WAIT, NOW + 0.23)
    assert lack.of("a", NOW + 0.23) == 0
    lack.look([need("a", 100)], WAIT, NOW + 0.24)
    assert lack.of("a", NOW + 0.24) == 0, "it begins anew"


def test_kv_shortage_ends_where_no_request_waits():
    lack = KvShortages()
    lack.look([need("a", 100)], WAIT, NOW)
    assert lack
    lack.look([], {"a": 0, "b": 1}, NOW + 0.01)
    assert not lack and lack.of("a", NOW + LASTING_S) == 0


def test_kv_that_its_own_limit_keeps_from_a_model_is_no_shortage():
    lack = KvShortages()
    lack.look([need("a", 0)], WAIT, NOW)
    assert not lack and lack.of("a", NOW + LASTING_S) == 0
