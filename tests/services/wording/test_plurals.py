from services.wording.plurals import agreeing, counted


def test_plural_of_a_word_agrees_with_its_count():
    assert [counted(count, "model") for count in (0, 1, 2)] == ["0 models", "1 model", "2 models"]
    assert [counted(count, "entry", "entries") for count in (1, 3)] == ["1 entry", "3 entries"]
    assert [agreeing(count, "leaves", "leave") for count in (0, 1, 2)] == ["leave", "leaves", "leave"]
