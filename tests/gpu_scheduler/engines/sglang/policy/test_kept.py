from gpu_scheduler.engines.sglang.policy.kept import BoundedCache


def test_bounded_cache_drops_the_least_recently_used_entry_first() -> None:
    kept: BoundedCache[str, int] = BoundedCache(10)
    kept.put("a", 1, 4)
    kept.put("b", 2, 4)
    assert kept.get("a") == 1
    kept.put("c", 3, 4)
    assert (kept.get("a"), kept.get("b"), kept.get("c")) == (1, None, 3)
    assert (len(kept), kept.nbytes) == (2, 8)


def test_bounded_cache_keeps_an_entry_larger_than_its_bound_alone() -> None:
    kept: BoundedCache[str, int] = BoundedCache(10)
    kept.put("a", 1, 4)
    kept.put("b", 2, 40)
    assert (kept.get("a"), kept.get("b"), kept.nbytes) == (None, 2, 40)
    kept.put("c", 3, 4)
    assert (kept.get("b"), kept.nbytes) == (None, 4)


def test_bounded_cache_counts_a_key_once_and_nothing_once_cleared() -> None:
    kept: BoundedCache[str, int] = BoundedCache(10)
    kept.put("a", 1, 4)
    kept.put("a", 2, 5)
    assert (kept.get("a"), len(kept), kept.nbytes) == (2, 1, 5)
    kept.clear()
    assert (kept.get("a"), len(kept), kept.nbytes) == (None, 0, 0)
