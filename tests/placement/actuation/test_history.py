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


def test_a_decision_that_fails_says_so_of_its_parts_as_well():
    history = DecisionHistory()
    for model in ("done", "undone"):
        whole = history.add(model, "activate", "g", "a request")
        whole.parts.append(history.add("quiet", "hibernate", "g", "idle", outcome=f"part of activating {model}"))
        if model == "undone":
            whole.failed("no engine")
        else:
            whole.done(1.0)
    outcomes = [(d.model, d.outcome) for d in history.last("", 0)]
    assert outcomes == [
        ("quiet", "part of activating undone, which failed"),
        ("undone", "failed: no engine"),
        ("quiet", "part of activating done"),
        ("done", "done in 1.00 s"),
    ]
