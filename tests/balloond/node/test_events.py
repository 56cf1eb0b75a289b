from balloond.node.events import EventHistory


def test_event_history_is_bounded_and_oldest_first():
    history = EventHistory(length=3)
    for number in range(5):
        history.add(float(number), "cpu:0", "m", "what", f"{number}")
    assert [event.detail for event in history.last()] == ["2", "3", "4"]
    assert [event.sequence for event in history.last(2)] == [4, 5]
    assert len(history.last(10)) == 3
