from placement.actuation.history import KEPT, DecisionHistory


def test_decision_history_lists_the_newest_first_with_their_outcome():
    history = DecisionHistory(lambda: 5.0)
    history.add("a", "activate", "g0", "first").done(0.125)
    history.add("b", "activate", "g0", "second")
    assert [(d.model, d.outcome, d.took_s) for d in history.last("", 0)] == [
        ("b", "under way", 0.0),
        ("a", "done in 0.12 s", 0.125),
    ]
    assert [d.reason for d in history.last("a", 5)] == ["first"]


def test_decision_history_is_bounded():
    history = DecisionHistory()
    for i in range(KEPT + 10):
        history.add("a", "activate", "g", str(i))
    decisions = history.last("a", 0)
    assert len(decisions) == KEPT and decisions[0].reason == str(KEPT + 9)
