import pytest

from services.wording.toml_lines import line_of

TEXT = """\
# Models.
name = "loader"
devices = [
    "cpu:0",  # name = "not a key"
    "cpu:1",
]

[engines]
warm = 1
options = { name = "x" }

[[model]]
name = "a"

[[model]]
# The second.
name = "b"
path = '''
name = "c"
'''
"""


@pytest.mark.parametrize(
    ("at", "line"),
    [
        (("name",), 2),
        (("devices",), 3),
        (("devices", 1), 3),
        (("engines",), 8),
        (("engines", "warm"), 9),
        (("engines", "options", "name"), 10),
        (("model", 0), 12),
        (("model", 1, "name"), 17),
        (("model", 1, "path"), 18),
        (("model", 1, "ttft_ms"), 15),
        (("engines", "lost", "key"), 8),
        (("lost",), None),
        ((), None),
    ],
)
def test_toml_line_of_a_key_is_its_first_and_of_a_missing_one_that_of_its_table(at, line):
    assert line_of(TEXT, at) == line
