from gpu_scheduler.engines.sglang.policy.kept import BoundedCache


def test_what_was_not_asked_for_the_longest_leaves_first() -> None:
    kept: BoundedCache[str, int] = BoundedCache(10)
    kept.put("a", 1, 4)
    kept.put("b", 2, 4)
    assert kept.get("a") == 1
    kept.put("c", 3, 4)
    assert (kept.get("a"), kept.get("b"), kept.get("c")) == (1, None, 3)
    assert (len(kept), kept.nbytes) == (2, 8)


def test_one_that_is_too_large_is_kept_alone() -> None:
    kept: BoundedCache[str, int] = BoundedCache(10)
    kept.put("a", 1, 4)
    kept.put("b", 2, 40)
    assert (kept.get("a"), kept.get("b"), kept.nbytes) == (None, 2, 40)
    kept.put("c", 3, 4)
    assert (kept.get("b"), kept.nbytes) == (None, 4)


def test_the_same_key_counts_once_and_nothing_is_left_of_what_is_cleared() -> None:
    kept: BoundedCache[str, int] = BoundedCache(10)
    kept.put("a", 1, 4)
    kept.put("a", 2, 5)
    assert (kept.get("a"), len(kept), kept.nbytes) == (2, 1, 5)
    kept.clear()
    assert (kept.get("a"), len(kept), kept.nbytes) == (None, 0, 0)
