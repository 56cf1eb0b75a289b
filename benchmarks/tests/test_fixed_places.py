"""Divisions of models among two GPUs are replayed where they are said to be."""

from benchmarks import fixed_places_sim
from benchmarks._slices import Part

TRACE = "arrival_s,model,prompt_tokens,output_tokens\n" + "".join(
    f"{i / 2:.2f},n{i % 8},{100 + i},{1 + i % 20}\n" for i in range(20)
)


def test_slice_is_served_in_the_places_of_a_division(tmp_path):
    (tmp_path / "t.csv").write_text(TRACE)
    part = Part("t", "t.csv", 0.0, 1.0, 10.0)
    assert 0.0 < fixed_places_sim.attained(part, fixed_places_sim.divisions()[0], tmp_path) <= 100.0
