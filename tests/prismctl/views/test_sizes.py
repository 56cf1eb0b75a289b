import pytest
import typer

from prismctl.views.sizes import parse_size


@pytest.mark.parametrize(
    ("text", "count"),
    [("4096", 4096), ("12MiB", 12 << 20), ("1.5GiB", 3 << 29), ("3k", 3072), ("7 B", 7), ("none", -1)],
)
def test_sizes_are_read_as_people_write_them(text, count):
    assert parse_size(text, none=True) == count


@pytest.mark.parametrize("text", ["", "much", "12XB", "-5", "none"])
def test_malformed_size_is_refused(text):
    with pytest.raises(typer.BadParameter, match="is no size"):
        parse_size(text)


def test_size_larger_than_any_machine_is_refused():
    for text in ("9999999999GiB", "9" * 400):
        with pytest.raises(typer.BadParameter, match="is more than any machine has"):
            parse_size(text)
