from prismctl.views.tables import Column, Row, TableSection, render

COLUMNS = (Column("model"), Column("state"), Column("held", 1, right=True), Column("path", 2))
LINES = (
    TableSection("cpu:0: 4 of 8 free"),
    Row(("meta-llama/Llama-3.1-8B-Instruct", "active", "1.0 GiB", "/models/llama")),
    Row(("tiny", "error", "0 B", "/models/tiny"), "tiny: its weights are 4,000 bytes too many for this group"),
)


def test_table_with_room_has_all_columns():
    assert render(COLUMNS, LINES, 120).splitlines() == [
        "  model                             state      held  path",
        "cpu:0: 4 of 8 free",
        "  meta-llama/Llama-3.1-8B-Instruct  active  1.0 GiB  /models/llama",
        "  tiny                              error       0 B  /models/tiny",
        "    tiny: its weights are 4,000 bytes too many for this group",
    ]


def test_table_without_room_drops_the_least_important_columns_and_wraps_sentences():
    assert render(COLUMNS, LINES, 52).splitlines() == [
        "  model                             state      held",
        "cpu:0: 4 of 8 free",
        "  meta-llama/Llama-3.1-8B-Instruct  active  1.0 GiB",
        "  tiny                              error       0 B",
        "    tiny: its weights are 4,000 bytes too many for",
        "    this group",
    ]
    assert render(COLUMNS, LINES[:2], 50).splitlines()[2] == "  meta-llama/Llama-3.1-8B-Instruct  active"


def test_table_columns_that_always_stay_are_never_cut():
    assert render(COLUMNS, LINES[:2], 10).splitlines()[2] == "  meta-llama/Llama-3.1-8B-Instruct  active"


def test_table_without_rows_has_its_titles():
    assert render(COLUMNS, (), 80) == "model  state  held  path"
