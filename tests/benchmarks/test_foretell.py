"""What is said of the comparison on GPUs before it is run."""

from benchmarks import foretell
from benchmarks.systems import GPU, SYSTEMS


def test_a_run_becomes_one_of_another_system_and_stays_what_it_was() -> None:
    run = {"run": {"system": "static"}, "system": {"catalogue": {"a": {"quota_bytes": 2 << 30}}, "settings": {}}}
    other = foretell.as_system(run, "serverlessllm", GPU.quota_bytes)
    assert other["run"]["system"] == "serverlessllm" and run["run"]["system"] == "static"
    assert other["system"]["catalogue"]["a"]["quota_bytes"] == GPU.quota_bytes
    assert other["system"]["settings"]["placement"]["idle_s"] == SYSTEMS["serverlessllm"].placement["idle_s"]
    assert run["system"]["catalogue"]["a"]["quota_bytes"] == 2 << 30


def test_every_system_that_is_foretold_is_one_of_the_simulator() -> None:
    assert set(foretell.FORETOLD) <= set(foretell.sim_check.POLICIES)
    arrival = dict(foretell.sim_check.POLICIES["no-arbitration"][1])
    assert arrival == {
        "order": "arrival",
        "prefill_turn": "false",
        "protect_decodes": "false",
        "precedence_ms": "0.0",
        "decode_turn_ms": "0.0",
    }
