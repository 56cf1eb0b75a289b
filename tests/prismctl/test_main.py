import json

import pytest
import typer
from typer.testing import CliRunner

from placement.server import NAME
from prismctl.__main__ import app, parse_size
from protos import common_pb2, placement_pb2, placement_pb2_grpc
from services import rpc


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


@pytest.fixture
async def run(tmp_path):
    """Runs prismctl in a thread (it has a loop of its own) against a real server."""
    import asyncio

    address = f"unix:{tmp_path}/placement.sock"
    server = rpc.Server(address)
    server.add(placement_pb2_grpc.add_PlacementServicer_to_server, Placement(), NAME)
    await server.start()

    async def run(*arguments, columns=None):
        runner = CliRunner(env={"COLUMNS": columns})
        return await asyncio.to_thread(runner.invoke, app, ["--state", str(tmp_path), *arguments])

    yield run
    await server.stop(0)


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


async def test_a_limit_for_a_model_that_is_nowhere_is_one_clear_line(run):
    result = await run("limit", "bad", "1MiB")
    assert result.exit_code == 1
    assert "bad is on no group now" in result.output
