from structlog.testing import capture_logs

from placement.cluster.refusals import Refusals


def test_a_group_is_refused_while_another_address_has_its_name_and_the_log_says_so_once():
    refusals = Refusals()
    with capture_logs() as lines:
        assert not refusals.refuses_group("one", "g", holder="")
        assert not refusals.refuses_group("one", "g", holder="one")
        assert refusals.refuses_group("two", "g", holder="one") and refusals.refuses_group("two", "g", holder="one")
        assert not refusals.refuses_group("two", "g", holder="")
        assert refusals.refuses_group("two", "g", holder="one")
    assert [line["address"] for line in lines] == ["two", "two"], "it was taken in between"


def test_a_ledger_is_refused_until_the_balloond_that_reports_its_node_is_away():
    refusals = Refusals()
    with capture_logs() as lines:
        assert not refusals.refuses_ledger("one", "n", is_away=False)
        assert refusals.refuses_ledger("two", "n", is_away=False) and refusals.refuses_ledger("two", "n", is_away=False)
        assert refusals.refuses_ledger("two", "n", is_away=True), "it was not counted, so nothing is lost"
        assert refusals.has_ledger("one") and not refusals.has_ledger("two")
        assert not refusals.refuses_ledger("one", "n", is_away=True) and not refusals.has_ledger("one")
        assert not refusals.refuses_ledger("two", "n", is_away=False)
    assert [(line["event"], line["why"]) for line in lines] == [("ledger refused", "one is of a node 'n' as well")]


def test_an_address_that_left_and_joins_again_is_refused_anew():
    refusals = Refusals()
    refusals.refuses_ledger("one", "n", is_away=False)
    with capture_logs() as lines:
        refusals.refuses_group("two", "g", holder="one")
        refusals.refuses_ledger("two", "n", is_away=False)
        refusals.forget_group("two")
        refusals.forget_ledger("two")
        refusals.refuses_group("two", "g", holder="one")
        refusals.refuses_ledger("two", "n", is_away=False)
    assert len(lines) == 4
