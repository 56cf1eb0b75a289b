"""What is said of the comparison on GPUs before it is run."""

from benchmarks import foretell
from benchmarks.gpu.slices import TPOT_SCALE, TTFT_SCALE
from benchmarks.systems import GPU, SYSTEMS
from sim.engines.cost import H100, H200


def test_a_run_becomes_one_of_another_system_and_stays_what_it_was() -> None:
    run = {"run": {"system": "static"}, "system": {"catalogue": {"a": {"quota_bytes": 2 << 30}}, "settings": {}}}
    run["began"] = {"a": "cuda:0"}
    other = foretell.as_system(run, "serverlessllm", GPU.quota_bytes)
    assert other["run"]["system"] == "serverlessllm" and run["run"]["system"] == "static"
    assert other["system"]["catalogue"]["a"]["quota_bytes"] == GPU.quota_bytes
    assert other["system"]["settings"]["placement"]["idle_s"] == SYSTEMS["serverlessllm"].placement["idle_s"]
    assert run["system"]["catalogue"]["a"]["quota_bytes"] == 2 << 30
    assert "began" in run and "began" not in other, "places are of one system"


def test_a_run_gets_the_targets_and_the_gpu_of_models_that_were_alone_elsewhere() -> None:
    run = {"run": {"slice": "busy"}, "system": {"shapes": {"a": "8b", "b": "1b"}}, "slos": {"a": {"ttft_ms": 1.0}}}
    alone = {"slos": {"busy": {"a": {"ttft_ms": 20.0, "tpot_ms": 6.0}}}, "circumstances": {"gpu": "NVIDIA H100 80GB"}}
    other = foretell.with_targets(run, alone)
    assert other["slos"] == {"a": {"ttft_ms": TTFT_SCALE * 20.0, "tpot_ms": TPOT_SCALE * 6.0}}
    assert foretell.sim_check.hardware_of(other) is H100 and foretell.sim_check.hardware_of(run) is H200
    assert run["slos"] == {"a": {"ttft_ms": 1.0}}


def test_every_system_that_is_foretold_is_one_of_the_simulator() -> None:
    assert set(foretell.FORETOLD) <= set(foretell.sim_check.POLICIES)
    arrival = dict(foretell.sim_check.POLICIES["no-arbitration"][1])
    assert arrival == {
        "order": "arrival",
        "prefill_turn": "false",
        "protect_decodes": "false",
        "prefill_priority_ms": "0.0",
        "decode_arbitration_ms": "0.0",
    }
