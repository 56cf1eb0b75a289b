"""`prismctl plan`, as a person and as a script use it."""

import json
import shutil

import pytest
from typer.testing import CliRunner

from prismctl.__main__ import app
from sim.policies import SYSTEMS
from testing import small_checkpoints
from tests.loader import checkpoint_files

CATALOGUE = '[[model]]\nname = "chat"\nshape = "8b"\nttft_ms = 2000\ntpot_ms = 100\n'
RATES = "model,requests_per_s,prompt_tokens,output_tokens\nchat,{rate},100,20\n"
TRACE = "arrival_s,model,prompt_tokens,output_tokens\n0.5,chat,100,20\n1.5,chat,100,20\n"


@pytest.fixture
def files(tmp_path):
    (tmp_path / "models.toml").write_text(CATALOGUE)
    (tmp_path / "rates.csv").write_text(RATES.format(rate=2))
    (tmp_path / "trace.csv").write_text(TRACE)
    (tmp_path / "empty.csv").write_text("")
    return tmp_path


def run(files, *arguments, catalogue="models.toml"):
    options = ["plan", "--catalogue", str(files / catalogue)]
    return CliRunner().invoke(app, [*options, *(each.format(files=files) for each in arguments)])


def test_plan_of_a_load_that_fits_exits_with_status_0(files):
    result = run(files, "--rates", "{files}/rates.csv", "--seconds", "20", "--gpus", "1")
    assert result.exit_code == 0
    assert "fits: 100.0 % of" in result.stdout and "with 1 GPU; 99 % asked" in result.stdout


def test_plan_for_the_fewest_gpus_finds_them_and_lists_every_fleet_tried(files):
    result = run(files, "--trace", "{files}/trace.csv", "--gpus", "4", "--fewest", "--json")
    answer = json.loads(result.stdout)
    assert result.exit_code == 0 and answer["fits"]
    assert answer["tried"][0]["gpus"] == 4 and answer["tried"][-1]["gpus"] == 1
    assert answer["tried"][-1]["report"]["all"]["requests"] == 2


def test_plan_of_a_model_whose_requests_have_large_states_has_room_for_fewer_at_once(files):
    shared = "\n".join(["arrival_s,model,prompt_tokens,output_tokens", *["0.5,chat,100,200"] * 40]) + "\n"
    (files / "trace.csv").write_text(shared)
    (files / "states.toml").write_text(CATALOGUE + f"state_bytes = {4 << 30}\n")
    firsts = []
    for catalogue in ("models.toml", "states.toml"):
        told = run(files, "--trace", "{files}/trace.csv", "--gpus", "1", "--json", catalogue=catalogue)
        firsts.append(json.loads(told.stdout)["tried"][-1]["report"]["all"]["ttft_s"]["p99"])
    assert firsts[1] > firsts[0] + 1.0, "the last ones wait for the first ones' states"


def test_a_fleet_of_h100s_decodes_more_slowly_than_one_of_h200s(files):
    medians = []
    for hardware in ("h100", "h200"):
        told = run(files, "--trace", "{files}/trace.csv", "--gpus", "1", "--json", "--hardware", hardware)
        medians.append(json.loads(told.stdout)["tried"][-1]["report"]["all"]["tpot_s"]["p50"])
    assert medians[0] > 1.2 * medians[1]


def test_plan_says_that_a_model_came_up_on_further_groups(files):
    (files / "rates.csv").write_text("model,requests_per_s,prompt_tokens,output_tokens\nchat,20,4000,20\n")
    result = run(files, "--rates", "{files}/rates.csv", "--seconds", "40", "--gpus", "2")
    assert "models came up on one group more 1 time: their load exceeds a group" in result.stdout


def test_plan_of_a_load_that_does_not_fit_exits_with_status_1(files):
    rates = RATES.format(rate=300)
    (files / "rates.csv").write_text(rates)
    result = run(files, "--rates", "{files}/rates.csv", "--seconds", "5", "--gpus", "1", "--slo-scale", "0.01")
    assert result.exit_code == 1 and "does not fit: " in result.stdout


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--gpus", "1"), "name a --trace or --rates"),
        (("--trace", "{files}/trace.csv", "--rates", "{files}/rates.csv", "--gpus", "1"), "name a --trace or --rates"),
        (("--trace", "{files}/none.csv", "--gpus", "1"), "No such file"),
        (("--trace", "{files}/rates.csv", "--gpus", "1"), "line 1: the columns are"),
        (("--trace", "{files}/empty.csv", "--gpus", "1"), "it is empty"),
        (("--rates", "{files}/rates.csv", "--rate", "0", "--gpus", "1"), "--rate has to be above zero"),
        (("--rates", "{files}/rates.csv", "--gpus", "1", "--policy", "best"), "no policy 'best'; there are"),
        (("--rates", "{files}/rates.csv", "--gpus", "1", "--hardware", "v100"), "no hardware 'v100'; there are h"),
        (("--rates", "{files}/rates.csv", "--gpus", "1", "--set", "tau"), "'tau' is not name=value"),
        (("--rates", "{files}/rates.csv", "--groups", "two"), "'two' is not a number of groups"),
        (("--rates", "{files}/rates.csv", "--gpus", "0"), "name --gpus or --groups"),
        (("--trace", "{files}/trace.csv", "--gpus", "1", "--rate", "1e9"), "line 2: more than 10,000,000 requests at"),
        (("--rates", "{files}/rates.csv", "--gpus", "1", "--from-s", "5"), "--from-s is for a --trace"),
        *(
            (
                ("--rates", "{files}/rates.csv", "--gpus", "1", "--policy", policy, "--set", "colour=red"),
                f"{policy} has no setting colour",
            )
            for policy in SYSTEMS
        ),
        (("--rates", "{files}/rates.csv", "--gpus", "1", "--set", "period_s=-1"), "period_s: it should be greater"),
        (
            ("--rates", "{files}/rates.csv", "--gpus", "1", "--set", "window_s=inf"),
            "window_s: it should be at most 86400",
        ),
        (("--rates", "{files}/rates.csv", "--gpus", "1", "--set", "traffic_file=x"), "no setting traffic_file"),
    ],
)
def test_plan_with_bad_input_exits_with_status_2_and_one_line(files, arguments, says):
    result = run(files, *arguments)
    assert result.exit_code == 2 and says in result.stderr and len(result.stderr.splitlines()) == 1


def test_plan_of_a_trace_with_times_of_a_clock_begins_at_its_first_request(files):
    (files / "trace.csv").write_text(TRACE.replace("0.5,", "1769900000.5,").replace("1.5,", "1769900001.5,"))
    told = run(files, "--trace", "{files}/trace.csv", "--gpus", "1", "--json")
    assert json.loads(told.stdout)["tried"][-1]["report"]["seconds"] == 1.0


def test_plan_says_which_requests_were_cut_and_which_models_have_no_targets(files):
    (files / "trace.csv").write_text(TRACE + "2.5,chat,90000,20\n3.5,free,100,20\n")
    (files / "models.toml").write_text(CATALOGUE + '[[model]]\nname = "free"\nshape = "1b"\n')
    told = run(files, "--trace", "{files}/trace.csv", "--gpus", "1").stdout
    assert "cut to their model's context_tokens: 1 request\n" in told
    assert "without targets, on time as soon as they are served: free\n" in told
    assert "left out" not in told
    neither = run(files, "--rates", "{files}/rates.csv", "--seconds", "5", "--gpus", "1").stdout
    assert "cut to" not in neither and "without targets" not in neither
    assert "left out, since nobody asks for them: free\n" in neither


def test_a_catalogue_without_models_is_refused_with_what_it_has(files):
    (files / "models.toml").write_text(CATALOGUE.replace("[[model]]", "[[models]]"))
    result = run(files, "--rates", "{files}/rates.csv", "--gpus", "1")
    assert result.exit_code == 2 and "no [[model]] in it, only models" in result.stderr


def test_a_fleet_that_cannot_hold_the_largest_model_is_refused_by_name(files):
    (files / "models.toml").write_text(CATALOGUE.replace('"8b"', '"70b"').replace("ttft", "devices = 1\nttft"))
    result = run(files, "--trace", "{files}/trace.csv", "--gpus", "1", "--hardware", "h100")
    assert result.exit_code == 1 and result.stdout.startswith("1 GPU: no group can hold chat: weights ")
    told = run(files, "--trace", "{files}/trace.csv", "--gpus", "1", "--hardware", "h100", "--json")
    answer = json.loads(told.stdout)
    assert told.exit_code == 1 and not answer["fits"]
    assert answer["tried"][0]["refused"].startswith("no group can hold chat: ")


KINDS = {
    "LlamaForCausalLM": ["attention"],
    "DeepseekV2ForCausalLM": ["latent"],
    "Gemma4ForConditionalGeneration": ["attention", "window"],
    "GptOssForCausalLM": ["attention", "window"],
    "NemotronHForCausalLM": ["attention", "state"],
    "Qwen3_5MoeForCausalLM": ["attention", "state"],
}
"""Names of the kinds of KV of a class, in order."""


@pytest.mark.parametrize("architecture", KINDS)
def test_plan_has_of_a_folder_what_models_check_says_and_so_it_has_by_its_config_alone(files, architecture):
    whole = small_checkpoints.write(architecture, files / "whole")
    (files / "bare").mkdir()
    shutil.copy(whole / "config.json", files / "bare")
    told = json.loads(CliRunner().invoke(app, ["models", "check", str(whole), "--json"]).stdout)
    assert [kind["name"] for kind in told["kv_kinds"]] == KINDS[architecture]
    rows = "".join(f'[[model]]\nname = "{name}"\nfolder = "{name}"\nttft_ms = 2000\n' for name in ("whole", "bare"))
    (files / "models.toml").write_text(rows)
    trace = "".join(f"{second}.5,{name},100,20\n" for second in range(20) for name in ("whole", "bare"))
    (files / "trace.csv").write_text(TRACE.splitlines()[0] + "\n" + trace)
    result = run(files, "--trace", "{files}/trace.csv", "--gpus", "1", "--json")
    answer = json.loads(result.stdout)
    assert result.exit_code == 0, result.stderr
    assert answer["tried"][-1]["report"]["all"]["served"] == 40
    by_files, by_config = answer["folders"]
    for key in ("weights_bytes", "active_bytes", "kv", "kv_kinds", "context_tokens"):
        assert by_files[key] == told[key], key
    assert by_files["weights_source"] == "by its files"
    assert by_config["weights_source"].startswith("by its config.json")
    assert (by_config["kv_kinds"], by_config["context_tokens"]) == (told["kv_kinds"], told["context_tokens"])
    images = architecture == "Gemma4ForConditionalGeneration"
    assert ("without its part for images" in by_config["weights_source"]) == images
    assert by_config["weights_bytes"] == pytest.approx(told["weights_bytes"], rel=0.01) or images


@pytest.fixture
def bare(files):
    """A folder with config.json alone, beside a catalogue and a trace."""
    checkpoint_files.write(files / "bare")
    for path in (files / "bare").iterdir():
        if path.name != "config.json":
            path.unlink()
    return files / "bare"


def planned(files, *lines):
    (files / "models.toml").write_text("\n".join(["[[model]]", 'name = "chat"', 'folder = "bare"', *lines]))
    return run(files, "--trace", "{files}/trace.csv", "--gpus", "1", "--groups", "1x2")


def test_plan_has_the_weights_of_a_folder_by_the_catalogue_else_by_its_config_else_by_its_index(files, bare):
    (files / "trace.csv").write_text(TRACE.replace("100,20", "40,20"))
    by_config = "bare: weights 59.2 KiB by its config.json; KV 128 B a token; context up to 64 tokens"
    assert by_config in planned(files).stdout
    (bare / checkpoint_files.INDEX).write_text(json.dumps({"metadata": {"total_size": 5 << 20}}))
    assert by_config in planned(files).stdout, "its files may have larger floats than an engine, and further tensors"
    assert "weights 7.0 MiB by the catalogue;" in planned(files, f"weights_bytes = {7 << 20}").stdout
    both = planned(files, "devices = 2", 'kv_dtype = "fp8"').stdout
    assert "KV 64 B a token; context up to 64 tokens; on 2 devices together" in both
    checkpoint_files.change_config(bare, architectures=["OlmoForCausalLM"])
    assert "weights 5.0 MiB by its index;" in planned(files, "unverified = true").stdout


@pytest.mark.parametrize(
    ("change", "lines", "why"),
    [
        (None, (), "folder {bare}: its folder does not exist"),
        (
            {"num_hidden_layers": None},
            (),
            "folder {bare}: config.json has no num_hidden_layers; without a folder a row",
        ),
        (
            {"architectures": ["NoneForCausalLM"]},
            (),
            "folder {bare}: the architecture NoneForCausalLM is not supported",
        ),
        (
            {"architectures": ["OlmoForCausalLM"]},
            ("unverified = true",),
            "does not tell the weights of a OlmoForCausalLM: put its model.safetensors.index.json beside it, or give",
        ),
        ({}, ("devices = 3",), "4 attention heads with 2 key-value heads do not divide among 3 devices"),
    ],
)
def test_plan_of_a_folder_that_cannot_be_read_names_row_and_file_and_what_to_write(files, bare, change, lines, why):
    if change is None:
        shutil.rmtree(bare)
    else:
        checkpoint_files.change_config(bare, **change)
    told = planned(files, *lines)
    assert told.exit_code == 2 and len(told.stderr.splitlines()) == 1
    assert "model 1 (chat): " in told.stderr and why.format(bare=bare) in told.stderr


def test_plan_of_a_folder_with_weights_that_no_engine_reads_is_refused_as_the_loader_would(files, bare):
    (bare / "pytorch_model.bin").touch()
    assert "its weights are pickled files only: convert them to safetensors" in planned(files).stderr


def test_plan_of_an_adapter_says_that_its_requests_are_those_of_its_base(files, bare):
    (bare / "adapter_config.json").write_text("{}")
    assert "it is an adapter (LoRA), which takes no place of its own" in planned(files).stderr
