import json

import pytest
import typer
from typer.testing import CliRunner

from loader.server import NAME as LOADER
from placement.server import NAME
from prismctl.__main__ import app, parse_size
from protos import common_pb2, loader_pb2, loader_pb2_grpc, placement_pb2, placement_pb2_grpc
from services import rpc
from services.errors import NotFound, Unmet


@pytest.mark.parametrize(
    ("text", "count"),
    [("4096", 4096), ("12MiB", 12 << 20), ("1.5GiB", 3 << 29), ("3k", 3072), ("7 B", 7), ("none", -1)],
)
def test_sizes_are_read_as_people_write_them(text, count):
    assert parse_size(text) == count


@pytest.mark.parametrize("text", ["", "much", "12XB", "-5"])
def test_what_is_no_size_is_refused(text):
    with pytest.raises(typer.BadParameter, match="is no size"):
        parse_size(text)


class Placement(placement_pb2_grpc.PlacementServicer):
    def __init__(self):
        self.asked = []

    async def AddModel(self, request, context):
        self.asked.append(request.model)
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
        routes.routes.add(model=common_pb2.ModelSpec(name="good", weights_bytes=1 << 20), residency=common_pb2.ACTIVE)
        routes.routes.add(model=common_pb2.ModelSpec(name="bad"), residency=common_pb2.ERROR, error="truncated")
        yield routes
        await context.abort(14, "gone")

    async def GetCluster(self, request, context):
        cluster = placement_pb2.Cluster()
        group = cluster.groups.add(group="g0", reachable=True, capacity_bytes=1 << 30, free_bytes=1 << 29)
        group.models.add(
            model="meta-llama/Llama-3.1-8B-Instruct",
            residency=common_pb2.HIBERNATING,
            waiting=2,
            running=1,
            kv_held_bytes=123 << 20,
            kv_limit_bytes=999 << 20,
            idle_s=1234,
            tokens_per_s=4321.0,
        )
        return cluster

    async def Explain(self, request, context):
        reason = "pressure 0.1 on g0, the least of 2 groups; it hibernates there; other and another leave first"
        decision = placement_pb2.Decision(
            model=request.model, action="activate", group="g0", reason=reason, outcome="failed: no room"
        )
        return placement_pb2.ExplainResponse(decisions=[decision])


class Loader(loader_pb2_grpc.LoaderServicer):
    """One model, whose image is being read from disk for two engines."""

    def __init__(self):
        self.pinned = False

    async def Inspect(self, request, context):
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
        self.pinned = True
        return loader_pb2.PinResponse()

    async def Unpin(self, request, context):
        self.pinned = False
        return loader_pb2.UnpinResponse()


@pytest.fixture
async def run(tmp_path):
    """Runs prismctl in a thread (it has a loop of its own) against a real server."""
    import asyncio

    address = f"unix:{tmp_path}/placement.sock"
    server = rpc.Server(address)
    placement = Placement()
    server.add(placement_pb2_grpc.add_PlacementServicer_to_server, placement, NAME)
    await server.start()
    loader = rpc.Server(f"unix:{tmp_path}/loader.sock")
    loader.add(loader_pb2_grpc.add_LoaderServicer_to_server, Loader(), LOADER)
    await loader.start()

    async def run(*arguments, columns=None):
        runner = CliRunner(env={"COLUMNS": columns})
        return await asyncio.to_thread(runner.invoke, app, ["--state", str(tmp_path), *arguments])

    run.asked = placement.asked
    yield run
    await server.stop(0)
    await loader.stop(0)


async def test_models_as_json_has_states_and_errors(run):
    result = await run("models", "--json")
    rows = {row["model"]: row for row in json.loads(result.stdout)}
    assert rows["good"]["state"] == "active" and rows["bad"]["error"] == "truncated"


@pytest.mark.parametrize(
    ("command", "words"), [("models", ["good", "truncated"]), ("status", ["g0", "Llama", "512.0"])]
)
async def test_the_tables_show_what_an_operator_looks_for(run, command, words):
    result = await run(command)
    assert result.exit_code == 0
    for word in words:
        assert word in result.stdout


async def test_explain_shows_the_reason(run):
    result = await run("explain", "good", "--json")
    assert json.loads(result.stdout)[0]["reason"].startswith("pressure 0.1 on g0")


@pytest.mark.parametrize("command", ["models", "status", "explain"])
async def test_on_a_narrow_terminal_no_line_is_longer_and_each_model_has_one(run, command):
    result = await run(command, columns="80")
    assert result.exit_code == 0
    lines = result.stdout.splitlines()
    assert max(map(len, lines)) <= 80
    if command == "status":
        assert [line for line in lines if "Llama-3.1-8B-Instruct" in line and "hibernating" in line]


async def test_with_room_and_into_a_pipe_every_column_is_shown(run):
    for columns in ("160", None):
        result = await run("status", columns=columns)
        for word in ("123.0 MiB", "999.0 MiB", "1234 s", "4321"):
            assert word in result.stdout


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
    result = await run("models", "add", "m", "/m", "--context-tokens", "64", "--json")
    told = json.loads(result.stdout)
    assert (told["model"], told["path"], told["context_tokens"], told["weights_bytes"]) == ("m", "/m", 64, 3 << 20)
    assert not run.asked[-1].HasField("quota_bytes")


async def test_what_cannot_be_added_is_one_line_with_the_arithmetic_and_status_1(run):
    result = await run("models", "add", "large", "/large")
    assert result.exit_code == 1
    assert result.output.splitlines() == [
        "prismctl: large: weights 9 + floor 0 + engine quota 0 = 9 bytes; the largest group, g0, has 8"
    ]


async def test_a_model_is_removed_and_a_pinned_one_by_force(run):
    result = await run("models", "remove", "m")
    assert (result.exit_code, result.output) == (1, "prismctl: m is pinned: it is removed by force only\n")
    assert (await run("models", "remove", "m", "--force")).stdout == "m is removed\n"
    result = await run("models", "remove", "m", "--force", "--json")
    assert json.loads(result.stdout) == {"model": "m", "removed": True}


@pytest.mark.parametrize(
    "arguments", [("add", "m"), ("remove",), ("add", "m", "/m", "--quota", "much"), ("add", "m", "/m", "--wrong")]
)
async def test_a_wrong_command_line_is_status_2_and_asks_nobody(run, arguments):
    assert (await run("models", *arguments)).exit_code == 2
    assert run.asked == []


async def test_a_limit_for_a_model_that_is_nowhere_is_one_clear_line(run):
    result = await run("limit", "bad", "1MiB")
    assert result.exit_code == 1
    assert "bad is on no group now" in result.output


async def test_an_image_is_pinned_looked_at_and_unpinned(run):
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
