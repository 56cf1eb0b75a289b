from hypothesis import given
from hypothesis import strategies as st

from gpu_scheduler.engines.sharing import decode_arbitration
from gpu_scheduler.engines.sharing.decode_arbitration import bid

engines = st.lists(st.tuples(st.floats(0, 3), st.integers(1, 64), st.booleans()), min_size=1, max_size=8).map(
    lambda drawn: {bid(need, requests, place): wanting for place, (need, requests, wanting) in enumerate(drawn)}
)


def standing(all_of_them):
    """Those whose next step waits."""
    return {
        own
        for own, wanting in all_of_them.items()
        if decode_arbitration.waits(
            own, wanting, [other for other, wants in all_of_them.items() if wants and other != own]
        )
    }


def test_engine_that_needs_less_of_the_devices_decodes_first():
    small, large = bid(0.3, 1, 2), bid(0.7, 1, 1)
    assert standing({small: True, large: True}) == {large}


def test_engine_that_needs_less_for_each_request_decodes_first():
    one, many = bid(0.5, 1, 1), bid(0.8, 2, 2)
    assert standing({one: True, many: True}) == {one}


def test_engines_with_enough_time_for_all_do_not_stand_still():
    assert standing({bid(0.3, 1, 2): True, bid(0.5, 1, 1): True, bid(0.09, 1, 3): True}) == set()


def test_engine_ahead_of_its_target_stands_still_for_one_that_is_not_whatever_they_need():
    small, large = bid(0.1, 1, 1), bid(0.9, 1, 2)
    assert standing({small: False, large: True}) == {small}


def test_engines_all_ahead_of_their_targets_share_the_devices():
    assert standing({bid(0.1, 1, 1): False, bid(0.9, 1, 2): False}) == set()


@given(engines)
def test_arbitration_lets_all_that_want_to_decode_go_on_or_only_the_first_if_time_is_short(all_of_them):
    wanting = {own for own, wants in all_of_them.items() if wants}
    goes_on = set(all_of_them) - standing(all_of_them)
    if not wanting:
        assert goes_on == set(all_of_them)
    elif sum(own.need for own in wanting) > decode_arbitration.ENOUGH + 1e-9:
        assert goes_on == {min(wanting)}
    elif sum(own.need for own in wanting) < decode_arbitration.ENOUGH - 1e-9:
        assert goes_on == wanting


def test_engine_is_alone_where_no_other_one_may_decode_beside_it():
    own, less, more = bid(0.5, 1, 2), bid(0.45, 1, 1), bid(0.6, 1, 3)
    assert decode_arbitration.alone(own, True, [])
    assert decode_arbitration.alone(own, True, [more]), "which stands still"
    assert not decode_arbitration.alone(own, True, [less]), "which goes first"
    assert not decode_arbitration.alone(own, True, [bid(0.2, 1, 3)]), "both have what they need"
    assert not decode_arbitration.alone(own, False, []), "others may decode who want nothing either"


@given(engines)
def test_engine_alone_among_several_is_one_at_most_and_all_others_stand_still(all_of_them):
    wanting = {own for own, wants in all_of_them.items() if wants}
    alone = {own for own in wanting if decode_arbitration.alone(own, True, wanting - {own})}
    assert len(alone) <= 1
    if alone:
        assert set(all_of_them) - standing(all_of_them) == alone


def test_decodes_with_less_than_a_step_of_slack_are_due():
    assert decode_arbitration.due(-0.1, 0.005) and decode_arbitration.due(0.004, 0.005)
    assert not decode_arbitration.due(0.005, 0.005)


def test_decode_need_is_the_share_that_keeps_the_target_and_zero_for_an_unknown_step():
    assert decode_arbitration.need(0.005, 0.010) == 0.5
    assert decode_arbitration.need(0.0, 0.010) == 0
