from services.wording.sizes import size


def test_sizes_are_written_in_the_largest_unit_that_they_fill():
    assert [size(count) for count in (0, 1023, 1536, 3 << 20, 5 << 29)] == [
        "0 B",
        "1023 B",
        "1.5 KiB",
        "3.0 MiB",
        "2.50 GiB",
    ]
