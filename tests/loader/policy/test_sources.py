"""Which leases hold which content."""

from dataclasses import replace

from loader.policy.sources import Content, LeaseSource, Sources

CONTENT = Content("m", 1, 0, b"manifest")
SOURCE = LeaseSource("lease", "cuda:0", (1, 2), CONTENT, "rows:1")


def test_newest_source_of_a_content_comes_first():
    sources = Sources()
    other = replace(SOURCE, lease_id="other")
    sources.filled(SOURCE)
    sources.filled(other)
    assert sources.of(CONTENT) == [other, SOURCE]
    sources.filled(SOURCE)
    assert sources.of(CONTENT) == [SOURCE, other]


def test_sources_of_another_generation_rank_layout_or_checksum_do_not_match():
    sources = Sources()
    sources.filled(SOURCE)
    assert sources.of(CONTENT, "rows:1") == [SOURCE] and not sources.of(CONTENT, "rows:2")
    for changed in ({"model": "n"}, {"generation": 2}, {"rank": 1}, {"manifest": b"other"}):
        assert not sources.of(replace(CONTENT, **changed))


def test_a_lease_holds_what_it_was_filled_with_last_and_nothing_once_it_is_forgotten():
    sources = Sources()
    sources.filled(SOURCE)
    again = replace(SOURCE, extent_ids=(3, 4))
    sources.filled(again)
    assert SOURCE not in sources and again in sources and sources.of(CONTENT) == [again]
    sources.forget("lease")
    sources.forget("lease")
    assert again not in sources and not sources.of(CONTENT)


def test_doubted_content_has_no_source_and_others_keep_theirs():
    sources = Sources()
    other = replace(SOURCE, lease_id="other", content=replace(CONTENT, rank=1))
    for source in (SOURCE, replace(SOURCE, lease_id="second"), other):
        sources.filled(source)
    sources.doubt(CONTENT)
    assert not sources.of(CONTENT) and sources.of(other.content) == [other]


def test_sources_beyond_the_bound_are_forgotten_oldest_first():
    sources = Sources()
    for number in range(1000):
        sources.filled(replace(SOURCE, lease_id=f"lease{number}"))
    known = sources.of(CONTENT)
    assert known[0].lease_id == "lease999" and 100 < len(known) < 1000
