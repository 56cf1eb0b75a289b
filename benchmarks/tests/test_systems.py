"""The systems that are compared, as settings of the services, and the runs that compare them."""

import csv
import gzip
import json
from dataclasses import replace

import pytest

from benchmarks.gpu import compare, compared, shapes
from benchmarks.gpu.slices import SLICES, Cut, cut, load
from benchmarks.systems import CPU, SYSTEMS, Model, listed, local, plan
from deploy.local.topology import Local
from gpu_scheduler.config import GpuSchedulerConfig
from loader.catalogue import catalogue
from loader.catalogue.models import Sizes, read_model
from loader.checkpoints import checkpoint
from placement.config import PlacementConfig
from services.runtime.config import parse
from sim.inputs.request import SimulatedRequest
from testing.systems.local import catalogue as write_catalogue

MIB = 1 << 20
DEVICES = {"cpu:0": 40 * MIB, "cpu:1": 40 * MIB}


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    return [Model(name, shapes.write_headers(folder / name, "tiny"), 1024) for name in ("a", "b", "c", "d")]


def requests(**tokens):
    return [SimulatedRequest(str(i), name, 0.0, count, 1) for i, (name, count) in enumerate(tokens.items())]


def parts_of(models, sizes=CPU):
    return plan(models, requests(a=8000, b=4000, c=100), 1.0, DEVICES, sizes)


@pytest.mark.parametrize("name", SYSTEMS)
def test_the_services_take_the_settings_of_every_system(name, models, tmp_path):
    system, parts = SYSTEMS[name], parts_of(models)
    entries = listed(system, models, parts, CPU)
    path = write_catalogue(tmp_path, "echo", entries)
    assert {each.name for each in catalogue.read(path)} == set(entries)
    stack = Local(state=tmp_path, catalogue=path, devices=dict(DEVICES), **local(system, parts))
    configs = {process.name: process.arguments[1] for process in stack.processes() if "--config" in process.arguments}
    placement = parse(PlacementConfig, open(configs["placement"]).read(), "placement")
    group = parse(GpuSchedulerConfig, open(configs["gpu_scheduler-cpu-0"]).read(), "group")
    assert set(placement.places) == (set(entries) if system.planned else set())
    assert set(placement.places.values()) <= set(stack.group_names)
    assert placement.rebalance == (name in ("prism", "no-arbitration", "no-decode-turn", "no-hibernation"))
    assert group.elastic_kv == (name not in ("static", "no-ballooning"))
    experiments = group.arbitration.experiments
    assert (experiments.order == "moore_hodgson") == experiments.prefill_turn
    decode_turn = name in ("prism", "no-placement", "no-ballooning", "no-hibernation")
    assert (group.arbitration.decode_arbitration_ms > 0) == decode_turn
    assert all(entry["pinned"] == (name in ("static", "muxserve")) for entry in entries.values())


@pytest.mark.parametrize("set_aside", [0, 3 * MIB])
def test_a_divided_device_is_used_up_but_for_what_balloond_keeps(models, set_aside):
    parts = parts_of(models, replace(CPU, set_aside_bytes=set_aside))
    entries = listed(SYSTEMS["static"], models, parts, CPU)
    sizes = Sizes(CPU.dtype_bytes, CPU.kv_extent_bytes, CPU.quota_bytes)
    used = dict.fromkeys(DEVICES, 0)
    floors = {}
    for model in models:
        entry = catalogue.CatalogueEntry(name=model.name, **entries[model.name])
        found = read_model(entry, sizes)
        assert not found.error
        floors[model.name] = found.floor_bytes
        weights = -(-found.checkpoint.weights_bytes // CPU.weights_extent_bytes) * CPU.weights_extent_bytes
        used[parts[model.name].place.group] += weights + found.quota_bytes + found.floor_bytes
    for device, capacity in DEVICES.items():
        capacity -= set_aside
        assert capacity - 4 * CPU.kv_extent_bytes - 4 * CPU.dtype_bytes * MIB < used[device] <= capacity
    assert floors["a"] > floors["c"] and min(floors.values()) >= 1024 * 1536


def test_models_for_which_there_is_no_room_are_named(models):
    with pytest.raises(ValueError, match="no room for .*d"):
        plan(models, [], 1.0, {"cpu:0": 16 * MIB}, CPU)


def test_headers_without_weights_are_a_checkpoint_and_every_token_is_text(models):
    from tokenization.loading import load as load_tokenizer

    assert checkpoint.read(models[0].folder, 2).weights_bytes > 0
    assert (models[0].folder / "model.safetensors").stat().st_blocks * 512 < MIB
    tokenizer = load_tokenizer(str(models[0].folder))
    assert tokenizer.byte_level and all(tokenizer.token_bytes(token) for token in range(4096))


# --- runs and slices


def test_every_run_is_in_exactly_one_part_and_a_system_stays_together():
    halves = [compare.runs(part=(k, 2)) for k in (1, 2)]
    assert sorted(map(str, halves[0] + halves[1])) == sorted(map(str, compare.runs()))
    assert not {run.system for run in halves[0]} & {run.system for run in halves[1]}
    assert len({run.name for run in compare.runs()}) == len(compare.runs()) == len(SYSTEMS) * 2 * len(SLICES)


def test_runs_are_chosen_by_pattern_and_what_matches_nothing_is_refused():
    assert [run.name for run in compare.runs(["prism:busy:*"])] == ["prism-busy-2", "prism-busy-6"]
    with pytest.raises(ValueError, match="'prism:noon:2' is no run"):
        compare.runs(["prism:noon:2"])


def test_slices_share_a_start_unless_a_plan_is_in_the_settings(models, tmp_path):
    site = compared.site(list(DEVICES), len(models), 0, "echo")
    slices = {"busy": "a", "quiet": "d"}
    for name, model in slices.items():
        rows = "".join(f"{SLICES[name].from_s + second},{model},200,200\n" for second in range(60))
        (tmp_path / f"{name}.csv").write_text("arrival_s,model,prompt_tokens,output_tokens\n" + rows)

    def names(*patterns: str) -> list[list[str]]:
        tasks = []
        for run in compare.runs(patterns):
            cut = Cut(tmp_path / f"{run.slice}.csv", {slices[run.slice]: slices[run.slice]}, SLICES[run.slice])
            tasks.append(compare.task_of(run, cut, {}, models, site))
        return [[task.run.name for task in start] for start in compare.starts(tasks)]

    both = [["prism-busy-6", "prism-quiet-6"], ["no-hibernation-busy-6", "no-hibernation-quiet-6"]]
    assert names("prism:[bq]*:6", "no-hibernation:[bq]*:6") == both
    assert names("static:[bq]*:6") == [["static-busy-6"], ["static-quiet-6"]]


def test_a_cut_slice_keeps_its_times_and_names_are_dealt_over_the_whole_trace(tmp_path):
    around = ((-5.0, "y"), (0.0, "z"), (239.5, "x"), (240.0, "w"))
    for name in {part.trace for part in SLICES.values()}:
        starts = sorted(part.from_s for part in SLICES.values() if part.trace == name)
        rows = [[start + t, of, 9, 3] for start in starts for t, of in around if start + t >= 0]
        with gzip.open(tmp_path / name, "wt", newline="") as file:
            csv.writer(file).writerows([["arrival_s", "model", "prompt_tokens", "output_tokens"], *rows])
    cut(tmp_path, tmp_path / "cut", ["one", "two"])
    busy = load(tmp_path / "cut", "busy", ["one", "two"])
    assert busy.names == {"w": "one", "x": "two", "y": "one", "z": "two"}
    found = busy.requests(8, {"two": {"tpot_ms": 20.0}})
    assert [(each.model, each.arrival, each.prompt_tokens, each.tpot_s) for each in found] == [
        ("two", 0.0, 7, 0.02),
        ("two", 239.5, 7, 0.02),
    ]
    assert load(tmp_path / "cut", "busy", ["only"], 6.0).names["z"] == "only"


async def test_what_has_its_result_is_skipped_and_what_there_is_no_time_for_is_named(models, tmp_path):
    (tmp_path / "slos.json").write_text(json.dumps({"slos": {name: {} for name in SLICES}}))
    cut_to = tmp_path / "cut"
    cut_to.mkdir()
    (cut_to / "busy.json").write_text('{"x": "a"}')
    row = f"{SLICES['busy'].from_s},x,9,3\n"
    (cut_to / "busy.csv").write_text("arrival_s,model,prompt_tokens,output_tokens\n" + row)
    (tmp_path / "prism-busy-2.json").write_text("{}")
    arguments = ["run", "prism:busy:*", "--traces", str(cut_to), "--out", str(tmp_path), "--limit-s", "30"]
    site = compared.site(list(DEVICES), len(models), 0, "echo")
    assert await compare.run(compare.parse(arguments), models, site) == ["prism-busy-6: no time left"]
