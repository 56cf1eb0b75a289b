import pytest

from balloond.policy.kv_limits import WHOLE_DEVICE, Limits
from services.errors import Invalid


@pytest.fixture
def limits():
    return Limits(100)


def test_a_limit_is_the_whole_device_until_one_is_set(limits):
    assert limits.get("m").bytes == 100
    assert limits.set("m", 40, 0, 0, floor=0, held=10).state == "applied"
    assert limits.get("m").bytes == 40
    limits.set("m", WHOLE_DEVICE, 0, 0, floor=0, held=10)
    assert limits.get("m").bytes == 100


def test_a_limit_below_what_is_held_is_deferred_with_the_overage(limits):
    outcome = limits.set("m", 40, 0, 500, floor=0, held=55)
    assert (outcome.state, outcome.overage, outcome.limit.revision, outcome.limit.deadline_ms) == (
        "deferred",
        15,
        1,
        500,
    )


def test_limit_set_again_with_the_same_revision_is_applied_or_with_other_bytes_a_conflict(limits):
    limits.set("m", 40, 7, 0, floor=0, held=0)
    again = limits.set("m", 40, 7, 0, floor=0, held=0)
    assert (again.state, again.limit.revision, again.changed) == ("applied", 7, False)
    other = limits.set("m", 41, 7, 0, floor=0, held=0)
    assert (other.state, other.limit.bytes) == ("conflict", 40)


def test_limit_with_an_older_revision_is_stale_and_changes_nothing(limits):
    limits.set("m", 40, 7, 0, floor=0, held=0)
    assert limits.set("m", 30, 6, 0, floor=0, held=0).state == "stale"
    assert limits.get("m").bytes == 40


def test_limit_retry_after_a_squeeze_took_the_next_revision_is_answered_as_before(limits):
    limits.set("m", 40, 7, 0, floor=0, held=0)
    limits.squeeze("m", 20, owner=1)
    assert limits.get("m").revision == 8
    assert limits.set("m", 40, 7, 0, floor=0, held=0).state == "applied"
    assert limits.set("m", 50, 8, 0, floor=0, held=0).state == "stale"


def test_a_limit_below_the_floor_is_refused_with_both_numbers(limits):
    with pytest.raises(Invalid, match=r"limit of 10 bytes is below the floor of m, 20 bytes"):
        limits.set("m", 10, 0, 0, floor=20, held=0)
    assert limits.get("m").bytes == 100


def test_squeezes_bound_a_model_until_their_owner_lifts_them(limits):
    limits.set("m", 60, 0, 0, floor=0, held=0)
    limits.squeeze("m", 30, owner=1)
    limits.squeeze("m", 50, owner=2)
    assert limits.get("m").bytes == 30
    assert limits.lift(1) == ["m"]
    assert limits.get("m").bytes == 50
    assert limits.lift(2) == ["m"]
    assert limits.get("m").bytes == 60
    assert limits.lift(2) == []


def test_limit_rises_with_the_floor(limits):
    limits.set("m", 10, 0, 0, floor=0, held=0)
    assert limits.raise_to("m", 25)
    assert limits.get("m").bytes == 25
    assert not limits.raise_to("m", 20)


def test_limit_revisions_rise_with_every_change_and_over_a_restart(limits):
    seen = [limits.get("m").revision]
    for change in (
        lambda: limits.set("m", 40, 0, 0, floor=0, held=0),
        lambda: limits.squeeze("m", 30, owner=1),
        lambda: limits.lift(1),
        lambda: limits.forget("m"),
        lambda: limits.set("m", 50, 0, 0, floor=0, held=0),
    ):
        change()
        seen.append(limits.get("m").revision)
    assert seen == sorted(set(seen))
    successor = Limits(100)
    successor.restore("m", *limits.kept("m"))
    assert successor.get("m").bytes == 50
    assert successor.get("m").revision > seen[-1]


@pytest.mark.parametrize("revision", [-1, (1 << 62) + 1, (1 << 63) - 1])
def test_limit_revision_outside_its_range_is_refused(limits, revision):
    with pytest.raises(Invalid, match=f"revision {revision}"):
        limits.set("m", 40, revision, 0, floor=0, held=0)
    assert limits.get("m").revision == 0
