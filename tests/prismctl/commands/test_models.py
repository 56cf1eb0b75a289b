"""`prismctl models`, as a person and as a script use it, against a placement and a loader that say what is needed."""

import asyncio
import json

import pytest
from typer.testing import CliRunner

from loader.server import NAME as LOADER
from placement.server import NAME
from prismctl.__main__ import app
from protos import common_pb2, loader_pb2, loader_pb2_grpc, placement_pb2, placement_pb2_grpc
from services.errors import Conflict, NotFound, Refused, Unavailable, Unmet
from services.rpc import rpc
from tests.loader import checkpoint_files


class Placement(placement_pb2_grpc.PlacementServicer):
    def __init__(self):
        self.asked = []
        self.groups = []
        self.refuses = None

    async def AddModel(self, request, context):
        self.asked.append(request.model)
        self.check_only = request.check_only
        if request.model.name == "large":
            raise Unmet("large: weights 9 + floor 0 + engine quota 0 = 9 bytes; the largest group, g0, has 8")
        spec = common_pb2.ModelSpec(
            name=request.model.name,
            path=request.model.path,
            architecture="LlamaForCausalLM",
            context_tokens=request.model.context_tokens or 1024,
            weights_bytes=3 << 20,
            floor_bytes=1 << 20,
            quota_bytes=request.model.quota_bytes,
        )
        return placement_pb2.AddModelResponse(model=spec)

    async def RemoveModel(self, request, context):
        self.asked.append(request)
        if not request.force:
            raise Unmet(f"{request.name} is pinned: it is removed by force only")
        return placement_pb2.RemoveModelResponse()

    async def WatchRoutes(self, request, context):
        routes = placement_pb2.Routes()
        good = common_pb2.ModelSpec(name="good", weights_bytes=1 << 20, unverified=True)
        routes.routes.add(model=good, residency=common_pb2.ACTIVE)
        bad = common_pb2.ModelSpec(name="bad", path="/models/bad")
        routes.routes.add(model=bad, residency=common_pb2.ERROR, error="truncated", retry_s=4.0)
        broken = routes.routes.add(model=common_pb2.ModelSpec(name="broken"), residency=common_pb2.WAKING)
        routes.routes.add(model=common_pb2.ModelSpec(name="slow"), residency=common_pb2.WAKING)
        yield routes
        broken.residency = common_pb2.COLD
        yield routes
        await asyncio.Event().wait()

    async def Activate(self, request, context):
        return placement_pb2.ActivateResponse(place=placement_pb2.Place(group="g0"))

    async def Evict(self, request, context):
        if self.refuses is None:
            why = "it has no image to sleep on: host memory is short; its engine is given back"
            return placement_pb2.EvictResponse(residency=common_pb2.ON_DISK, reason=why)
        raise self.refuses

    async def Explain(self, request, context):
        decision = placement_pb2.Decision(model=request.model, action="activate", outcome="failed: no room")
        return placement_pb2.ExplainResponse(decisions=[decision])

    async def GetCluster(self, request, context):
        return placement_pb2.Cluster(groups=self.groups)


class Loader(loader_pb2_grpc.LoaderServicer):
    """One model, whose image is being read from disk for two engines."""

    def __init__(self):
        self.pinned = False

    async def Inspect(self, request, context):
        if request.model.name == "large":
            why = "its weights take 513.0 MiB, all images together may take 256.0 MiB"
            return loader_pb2.Inspection(entry=loader_pb2.Entry(no_image=why))
        if request.model.name != "good":
            raise NotFound(f"no model '{request.model.name}' in the catalogue")
        entry = loader_pb2.Entry(on_disk=True, image_bytes=3 << 20, image_pinned=self.pinned)
        seen = loader_pb2.Inspection(model=common_pb2.ModelSpec(name="good"), entry=entry)
        progress = common_pb2.Progress(step="reading from disk", done=1 << 20, total=3 << 20, per_s=2 << 20, left_s=1.0)
        seen.under_way.add(kind="read", callers=2, progress=progress)
        progress = common_pb2.Progress(step="waiting")
        seen.under_way.add(kind="load", lease_id="l1", callers=1, progress=progress)
        return seen

    async def Pin(self, request, context):
        if request.model == "large":
            raise Refused("large is not pinned, since it can have no image to stay: its weights take 513.0 MiB")
        self.pinned = True
        return loader_pb2.PinResponse()

    async def Unpin(self, request, context):
        self.pinned = False
        return loader_pb2.UnpinResponse()


@pytest.fixture
async def run(tmp_path):
    """Runs prismctl in a thread (it has a loop of its own) against a real server."""
    address = f"unix:{tmp_path}/placement.sock"
    server = rpc.Server(address)
    placement = Placement()
    server.add(placement_pb2_grpc.add_PlacementServicer_to_server, placement, NAME)
    await server.start()
    await server.set_serving(True)
    loader = rpc.Server(f"unix:{tmp_path}/loader.sock")
    loader.add(loader_pb2_grpc.add_LoaderServicer_to_server, Loader(), LOADER)
    await loader.start()
    await loader.set_serving(True)

    async def run(*arguments, columns=None):
        runner = CliRunner(env={"COLUMNS": columns})
        return await asyncio.to_thread(runner.invoke, app, ["--state", str(tmp_path), "--wait", "60", *arguments])

    run.asked, run.placement = placement.asked, placement
    yield run
    await server.stop(0)
    await loader.stop(0)


def group(name, gib, devices=1, kind="cuda", **facts):
    found = placement_pb2.Group(group=name, reachable=True, capacity_bytes=gib << 30, **facts)
    for number in range(devices):
        found.memory.add(device=f"{kind}:{number}")
    return found


async def test_check_names_what_a_folder_needs_and_the_groups_that_could_hold_it(run, tmp_path):
    run.placement.groups += [group("small", 2), group("fits", 8), group("pair", 16, 2), group("away", 8, drained=True)]
    folder = checkpoint_files.write(tmp_path / "m")
    result = await run("models", "check", str(folder))
    assert result.exit_code == 0, result.output
    assert "LlamaForCausalLM: compared on CPU, GPU" in result.stdout and result.stdout.endswith("fits       fits\n")
    found = json.loads((await run("models", "check", str(folder), "--json")).stdout)
    assert found["groups"] == ["fits"] and found["device_bytes"] == (
        found["weights_bytes"] + found["floor_bytes"] + found["quota_bytes"]
    )
    assert found["kv_bytes_per_token"] == 2 * 2 * 2 * 8 * 2, "keys and values, layers, heads, head size, 16 bit"
    small = json.loads((await run("models", "check", str(folder), "--kv-dtype", "fp8", "--json")).stdout)
    assert 2 * small["kv_bytes_per_token"] == found["kv_bytes_per_token"]
    assert "  KV         128 B a token, " in result.stdout
    assert [(kind["name"], kind["bytes_per_token"]) for kind in found["kv_kinds"]] == [("attention", 128)]
    assert run.asked == []


async def test_check_is_for_engines_on_cpus_where_the_system_has_no_others(run, tmp_path):
    folder = checkpoint_files.write(tmp_path / "m")

    async def told(*options):
        found = json.loads((await run("models", "check", str(folder), *options, "--json")).stdout)
        return found["on"], found["kv_bytes_per_token"], found["groups"]

    assert await told() == ("gpu", 128, []), "nothing runs there"
    run.placement.groups += [group("host", 8, kind="cpu")]
    assert await told() == ("cpu", 256, ["host"])
    assert await told("--gpu") == ("gpu", 128, []), "the group is of other devices"
    run.placement.groups += [group("card", 8)]
    assert await told() == ("gpu", 128, ["card"])
    assert await told("--cpu") == ("cpu", 256, ["host"])


async def test_check_of_a_folder_of_a_refused_class_tells_the_kinds_of_kv_that_it_would_have(run, tmp_path):
    linear = {f"linear_num_{part}_heads": 2 for part in ("key", "value")}
    linear |= {f"linear_{part}_head_dim": 64 for part in ("key", "value")} | {"linear_conv_kernel_dim": 4}
    types = {"layer_types": ["linear_attention", "full_attention"]}
    folder = checkpoint_files.write(tmp_path / "m", architectures=["NextHybridForCausalLM"], **types, **linear)
    result = await run("models", "check", str(folder))
    assert result.exit_code == 1 and "is a hybrid of attention and state-space or linear layers" in result.stdout
    assert "  KV         attention 64 B a token, state 34.2 KiB a request, if it were served\n" in result.stdout
    found = json.loads((await run("models", "check", str(folder), "--json")).stdout)
    assert [kind["name"] for kind in found["kv_kinds"]] == ["attention", "state"]


async def test_check_of_a_folder_that_cannot_be_served_ends_with_the_reason(run, tmp_path):
    folder = checkpoint_files.write(tmp_path / "m", architectures=["NewForCausalLM"])
    result = await run("models", "check", str(folder))
    assert result.exit_code == 1 and "refused: the architecture NewForCausalLM is not supported" in result.stdout
    result = await run("models", "check", str(folder), "--unverified")
    assert result.exit_code == 1 and "SGLang has no class NewForCausalLM" in result.stdout
    folder = checkpoint_files.write(tmp_path / "olmo", architectures=["OlmoForCausalLM"])
    result = await run("models", "check", str(folder), "--unverified")
    assert result.exit_code == 0 and "OlmoForCausalLM: UNVERIFIED" in result.stdout
    result = await run("models", "check", str(folder), "--unverified", "--cpu", "--kv-dtype", "fp8")
    assert result.exit_code == 1 and "for GPUs" in result.stdout
    result = await run("models", "check", str(folder), "--devices", "3")
    assert result.exit_code == 2 and "--devices" in result.output


async def test_unverified_model_is_marked_wherever_it_is_listed(run):
    result = await run("models", "list")
    assert "good (unverified)" in result.stdout and "bad (unverified)" not in result.stdout


async def test_model_list_as_json_has_states_and_errors(run):
    result = await run("models", "list", "--json")
    rows = {row["model"]: row for row in json.loads(result.stdout)}
    assert rows["good"]["state"] == "active" and rows["bad"]["error"] == "truncated"
    assert (rows["bad"]["retry_s"], rows["bad"]["path"]) == (4.0, "/models/bad")


async def test_model_list_fits_a_narrow_terminal_and_shows_errors(run):
    result = await run("models", "list", columns="80")
    assert result.exit_code == 0
    assert "truncated; it is tried again within 4 s (/models/bad)" in " ".join(result.stdout.split())
    assert max(map(len, result.stdout.splitlines())) <= 80


async def test_a_model_is_added_by_its_absolute_path_with_its_settings(run, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    result = await run(
        "models", "add", "m", "folder/../m", "--ttft-ms", "500", "--pinned", "--quota", "2MiB", "--devices", "2"
    )
    assert result.exit_code == 0, result.output
    assert "m is added: LlamaForCausalLM, context 1024; weights 3.0 MiB + floor 1.0 MiB" in result.stdout
    (listing,) = run.asked
    assert listing == common_pb2.ModelListing(
        name="m",
        path=str(tmp_path / "m"),
        default_slo=common_pb2.Slo(ttft_ms=500),
        pinned=True,
        quota_bytes=2 << 20,
        devices=2,
    )
    result = await run("models", "add", "m", "/m", "--context-tokens", "64", "--tool-parser", "hermes", "--json")
    told = json.loads(result.stdout)
    assert (told["model"], told["path"], told["context_tokens"], told["weights_bytes"]) == ("m", "/m", 64, 3 << 20)
    assert not run.asked[-1].HasField("quota_bytes") and told["added"]
    assert run.asked[-1].tool_parser == "hermes"


async def test_add_with_check_only_does_not_report_the_model_as_added(run):
    result = await run("models", "add", "m", "/m", "--check")
    assert result.stdout.startswith("m could be added: LlamaForCausalLM") and run.placement.check_only
    assert not json.loads((await run("models", "add", "m", "/m", "--check", "--json")).stdout)["added"]


async def test_add_of_a_too_large_model_prints_the_sizes_in_one_line_and_exits_with_status_1(run):
    result = await run("models", "add", "large", "/large")
    assert result.exit_code == 1
    assert result.output.splitlines() == [
        "prismctl: large: weights 9 + floor 0 + engine quota 0 = 9 bytes; the largest group, g0, has 8"
    ]


@pytest.mark.parametrize("command", [("add", "m"), ("check",)])
async def test_name_of_a_model_of_the_hub_is_no_folder_and_the_answer_says_how_to_fetch_it(run, command):
    result = await run("models", *command, "org/m@v1", columns="200")
    assert result.exit_code == 2 and "prism fetch org/m@v1 prints its folder" in result.output
    assert run.asked == []


async def test_a_model_is_removed_and_a_pinned_one_by_force(run):
    result = await run("models", "remove", "m")
    assert (result.exit_code, result.output) == (1, "prismctl: m is pinned: it is removed by force only\n")
    assert (await run("models", "remove", "m", "--force")).stdout == "m is removed\n"
    result = await run("models", "remove", "m", "--force", "--json")
    assert json.loads(result.stdout) == {"model": "m", "removed": True}


@pytest.mark.parametrize(
    "arguments", [("add", "m"), ("remove",), ("add", "m", "/m", "--quota", "much"), ("add", "m", "/m", "--wrong")]
)
async def test_wrong_command_line_exits_with_status_2_and_calls_no_service(run, arguments):
    assert (await run("models", *arguments)).exit_code == 2
    assert run.asked == []


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("a=b", "/m"), "'a=b' cannot be a model's name: letters, digits and ._:/@+-"),
        (("a//b", "/m"), "'a//b' cannot be a model's name: there is nothing before, after or between slashes"),
        (("m\udcff", "/m"), "cannot be a model's name"),
        (("m", "/\udcff"), "FOLDER: "),
        (("m", "/m", "--devices", "3"), "--devices: it should be 1, 2 or 4"),
        (("m", "/m", "--context-tokens", str(1 << 80)), "--context-tokens: it should be less than 2147483648"),
        (("m", "/m", "--quota", "999999999999GiB"), "is more than any machine has"),
        (("m", "/m", "--quota", "500000GiB"), "--quota: it should be less than"),
        (("m", "/m", "--context-tokens", "9", "--floor-tokens", "5"), "floor_tokens 5 is less than one request"),
    ],
)
async def test_impossible_option_value_exits_with_status_2_and_names_the_option(run, arguments, says):
    result = await run("models", "add", *arguments, columns="200")
    assert result.exit_code == 2 and says in result.stderr and run.asked == []


async def test_a_path_with_an_equals_sign_is_a_path(run, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    await run("models", "add", "m", "v=3/m")
    assert run.asked[-1].path == f"{tmp_path}/v=3/m"


async def test_model_name_that_is_no_utf8_exits_with_status_2_and_one_line(run):
    for command in (("models", "wake"), ("models", "inspect"), ("explain",)):
        result = await run(*command, "m\udcff")
        assert (result.exit_code, result.stderr) == (2, "prismctl: 'm\\udcff' is not text\n")


async def test_limit_of_a_model_on_no_group_is_refused_in_one_line(run):
    result = await run("models", "limit", "bad", "1MiB")
    assert result.exit_code == 1
    assert "bad is on no group now" in result.output


@pytest.mark.parametrize(
    ("error", "status"), [(NotFound("no"), 1), (Unmet("no"), 1), (Unavailable("no"), 3), (Conflict("no"), 4)]
)
async def test_error_of_placement_is_one_line_and_its_kind_decides_the_status(run, error, status):
    run.placement.refuses = error
    result = await run("models", "sleep", "good")
    assert (result.exit_code, result.output) == (status, "prismctl: no\n")


async def test_sleep_that_brings_a_model_lower_than_hibernating_prints_the_reason(run):
    result = await run("models", "sleep", "good")
    why = "it has no image to sleep on: host memory is short; its engine is given back"
    assert (result.exit_code, result.stdout) == (0, f"good is on disk: {why}\n")
    told = json.loads((await run("models", "sleep", "good", "--json")).stdout)
    assert told == {"model": "good", "state": "on disk", "group": None, "reason": why}


async def test_a_model_that_can_have_no_image_is_not_pinned_and_inspect_says_why(run):
    result = await run("models", "pin", "large")
    assert result.exit_code == 1
    assert result.output == (
        "prismctl: large is not pinned, since it can have no image to stay: its weights take 513.0 MiB\n"
    )
    result = await run("models", "inspect", "large")
    why = "its weights take 513.0 MiB, all images together may take 256.0 MiB"
    assert result.stdout == f"large: image none: {why}\n"
    assert json.loads((await run("models", "inspect", "large", "--json")).stdout)["no_image"] == why


async def test_wake_of_a_model_that_does_not_come_up_exits_with_status_1_and_the_reason(run):
    for name, says in (
        ("broken", "broken did not come up: failed: no room"),
        ("bad", "bad: truncated"),
        ("ghost", "ghost was removed while it woke"),
    ):
        result = await run("models", "wake", name)
        assert (result.exit_code, result.stderr) == (1, f"prismctl: {says}\n")


async def test_wake_out_of_patience_exits_with_status_3_and_with_no_wait_prints_the_state(run):
    result = await run("models", "wake", "slow", "--patience", "0")
    assert (result.exit_code, result.stderr) == (3, "prismctl: slow is not active after 0 s; it is still waking\n")
    result = await run("models", "wake", "slow", "--no-wait", "--json")
    assert json.loads(result.stdout) == {"model": "slow", "group": "g0", "state": "waking"}


async def test_image_is_pinned_inspected_and_unpinned(run):
    assert (await run("models", "pin", "good")).stdout == "the image of good is pinned\n"
    result = await run("models", "inspect", "good", columns="100")
    first, _, read, load = result.stdout.splitlines()
    assert first == "good: image 3.0 MiB on disk, pinned"
    assert read.split("  ")[0] == "read" and "reading from disk" in read and "2.0 MiB" in read and "1.0 s" in read
    assert load.split()[:2] == ["load", "waiting"]
    assert (await run("models", "unpin", "good")).exit_code == 0
    told = json.loads((await run("models", "inspect", "good", "--json")).stdout)
    assert (told["in_memory"], told["on_disk"], told["image_pinned"]) == (False, True, False)
    assert [(each["bytes_per_s"], each["left_s"]) for each in told["under_way"]] == [(2 << 20, 1.0), (None, None)]
    result = await run("models", "inspect", "ghost")
    assert (result.exit_code, result.output) == (1, "prismctl: no model 'ghost' in the catalogue\n")
