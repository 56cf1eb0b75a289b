"""The command against a whole system: real services on Unix sockets, engines that echo."""

import asyncio
import contextlib
import json
import os
import pty
import signal
import sys

import pytest
import pytest_asyncio
from typer.testing import CliRunner

from deploy.healthy import healthy
from prismctl.__main__ import app
from prismctl.system import patience
from protos import common_pb2
from services.errors import PrismError
from services.runtime import tasks
from testing.patience import PATIENCE_S
from testing.systems.local import MODELS, ROOT, world
from tests.end_to_end.test_echo_system import PROMPT, ten_streams, undisturbed

pytestmark = pytest.mark.asyncio(loop_scope="module")
LLAMA, QWEN, PERL = MODELS
SERVICES = ["placement", "loader", "balloond", "gateway", "keeper", "cpu:0", "cpu:1"]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def running():
    # Steps of 20 ms: there is time to look at requests that run. The second device has room for one model.
    devices = {"cpu:0": 32 << 20, "cpu:1": 16 << 20}
    async with world("echo", options={"step_ms": "20"}, idle_s=0.2, devices=devices) as it:
        yield it


@pytest_asyncio.fixture(loop_scope="module")
async def system(running):
    await running.rest()
    return running


async def run(it, *arguments, status=0, columns=None):
    """What it printed; it has to end with this status."""
    runner = CliRunner(env={"COLUMNS": columns})
    result = await asyncio.to_thread(runner.invoke, app, ["--state", str(it.local.state), "--wait", "60", *arguments])
    assert result.exit_code == status, result.output
    return result.stdout if status == 0 else result.output


async def run_apart(it, *arguments, status):
    """The same in a process of its own, so that another one may run meanwhile."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "prismctl", "--state", str(it.local.state), *arguments,
        cwd=ROOT, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT,
    )  # fmt: skip
    output = (await process.communicate())[0].decode()
    assert process.returncode == status, output
    return output


async def value(it, *arguments, status=0):
    return json.loads(await run(it, *arguments, "--json", status=status))


@contextlib.asynccontextmanager
async def streaming(it, model):
    """While this is open, a request of the model runs, for longer than anybody looks; then its client goes away."""
    started = asyncio.Event()
    stream = asyncio.get_running_loop().create_task(it.stream(model, PROMPT, 1900, started))
    async with asyncio.timeout(PATIENCE_S):
        await started.wait()
    yield
    await tasks.cancel(stream)


async def with_image(it, model):
    """Awake, and with an image to sleep on."""
    await it.complete(model, PROMPT, 2)

    async def has_image():
        return (await value(it, "models", "inspect", model))["in_memory"]

    await it.until(has_image, "no image was made")
    await it.complete(model, PROMPT, 30)  # the group has heard of it meanwhile


async def test_status_of_a_healthy_system_lists_all_services_and_groups(system):
    assert f"all 7 services answer: {', '.join(SERVICES)}\n" in await run(system, "status")
    told = await value(system, "status")
    assert [each["service"] for each in told["services"] if each["answers"]] == SERVICES
    assert [group["group"] for group in told["groups"]] == ["cpu:0", "cpu:1"]


async def test_frame_of_top_accounts_for_every_byte_of_a_device_by_owner(system):
    async with streaming(system, LLAMA):
        told = await value(system, "top", "--once")
        text = await run(system, "top", "--once", columns="80")
    (group,) = (group for group in told["groups"] if group["models"])
    (device,) = group["devices"]
    parts = ("leased", "private", "stranded", "free")
    assert sum(device[f"{part}_bytes"] for part in parts) == device["capacity_bytes"]
    (owner,) = device["owners"]
    assert owner["model"] == LLAMA and owner["weights_bytes"] + owner["kv_bytes"] == device["leased_bytes"]
    assert owner["kv_used_bytes"] + owner["kv_cached_bytes"] + owner["kv_reserve_bytes"] <= owner["kv_bytes"]
    assert group["models"][0]["running"] == 1
    assert max(map(len, text.splitlines())) <= 80
    assert "1 running" in text and "[WWWW" in text and f"on no group: {QWEN}" in text


async def test_top_is_live_on_a_terminal_until_it_is_interrupted(system):
    """The frames of a pseudo-terminal: on the other screen, in colour, and the first screen is back at the end."""
    await run(system, "models", "wake", LLAMA)
    ours, theirs = pty.openpty()
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "prismctl", "--state", str(system.local.state), "top", "--every", "0.1",
        stdin=theirs, stdout=theirs, stderr=theirs, cwd=ROOT, env={**os.environ, "TERM": "xterm", "COLUMNS": "80"},
    )  # fmt: skip
    os.close(theirs)
    screen = asyncio.get_running_loop().run_in_executor(None, watched, ours, process)
    async with asyncio.timeout(PATIENCE_S):
        text = await screen
        assert await process.wait() == 0
    os.close(ours)
    assert text.startswith("\x1b[?1049h") and "\x1b[?1049l" in text
    assert text.count("2 groups; 3 models") >= 3 and "\x1b[32mactive" in text


def watched(terminal, process):
    """What is shown until the process ends; after three frames it is interrupted."""
    text, interrupted = "", False
    while True:
        try:
            told = os.read(terminal, 65536)
        except OSError:  # nobody writes any more
            return text
        if not told:
            return text
        text += told.decode(errors="replace")
        if not interrupted and text.count("2 groups; 3 models") >= 3:
            interrupted = True
            process.send_signal(signal.SIGINT)


async def test_top_without_a_terminal_prints_lines_or_json_objects(system):
    for option, is_frame in (
        ("--json", lambda line: json.loads(line)["groups"]),
        (None, lambda line: "2 groups;" in line),
    ):
        arguments = ["top", "--every", "0.1", *filter(None, [option])]
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "prismctl", "--state", str(system.local.state), *arguments,
            cwd=ROOT, stdout=asyncio.subprocess.PIPE, limit=1 << 20,
        )  # fmt: skip
        frames = 0
        async with asyncio.timeout(PATIENCE_S):
            while frames < 2:
                line = (await process.stdout.readline()).decode()
                assert "\x1b" not in line
                frames += bool(is_frame(line)) if line.strip() else 0
            process.send_signal(signal.SIGINT)
            await process.stdout.read()
            assert await process.wait() == 0


async def test_top_goes_on_while_services_die_and_come_back(system):
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "prismctl", "--state", str(system.local.state), "--wait", "0.5",
        "top", "--every", "0.1", "--json",
        cwd=ROOT, stdout=asyncio.subprocess.PIPE, limit=1 << 20,
    )  # fmt: skip

    async def answering():
        return {each["service"] for each in json.loads(await process.stdout.readline())["services"] if each["answers"]}

    async with asyncio.timeout(PATIENCE_S):
        while await answering() != set(SERVICES):
            pass
        for name in ("loader", "balloond", "gateway", system.local.scheduler("cpu:0")):
            system.kill(name)
        async with system.without("placement"):
            while "placement" in await answering():
                pass
        while await answering() != set(SERVICES):
            pass
        process.send_signal(signal.SIGINT)
        await process.stdout.read()
        assert await process.wait() == 0


async def test_unreachable_services_are_named_and_the_rest_of_the_system_is_shown(system):
    await run(system, "models", "wake", LLAMA)
    nowhere = f"unix:{system.local.state}/nowhere.sock"
    away = ("--wait", "60", "--placement", nowhere, "--loader", nowhere)
    for command in (("status",), ("top", "--once")):
        text = await run(system, *away, *command, status=3)
        assert f"does not answer: placement ({nowhere})" in text and f"does not answer: loader ({nowhere})" in text
        # Groups are found by their sockets.
        assert "cpu:0: " in text and "cpu:1: " in text and LLAMA in text
    told = await value(system, *away, "status", status=3)
    assert {each["service"] for each in told["services"] if each["answers"]} == {
        "balloond",
        "gateway",
        "keeper",
        "cpu:0",
        "cpu:1",
    }


@pytest.mark.parametrize(
    "command", [("models", "list"), ("explain", LLAMA), ("drain", "cpu:0"), ("models", "pin", LLAMA)]
)
async def test_command_whose_service_is_unreachable_prints_one_line_and_exits_with_status_3(system, command):
    nowhere = "unix:/nowhere/prism.sock"
    text = await run(system, "--wait", "0", "--placement", nowhere, "--loader", nowhere, *command, status=3)
    assert text.count("\n") == 1 and f" at {nowhere} does not answer; there is no such socket: --state FOLDER" in text


async def test_a_model_wakes_sleeps_and_moves(system):
    assert await run(system, "models", "wake", LLAMA) == f"{LLAMA} is active on cpu:0\n"
    told = await value(system, "models", "move", LLAMA, "cpu:1")
    assert (told["model"], told["group"]) == (LLAMA, "cpu:1")
    await with_image(system, LLAMA)
    assert await run(system, "models", "sleep", LLAMA) == f"{LLAMA} is hibernating\n"
    await system.wait_residency(LLAMA, common_pb2.HIBERNATING)
    said = f"{LLAMA} is hibernating: there is nothing to bring down"
    assert said in await run(system, "models", "sleep", LLAMA, status=1)
    await run(system, "models", "sleep", LLAMA, "--to", "attic", status=2)


async def test_model_comes_up_on_a_second_group_and_leaves_the_first(system):
    await run(system, "models", "wake", LLAMA)
    told = await value(system, "models", "replicate", LLAMA)
    assert told["group"] == "cpu:1" and told["seconds"] > 0
    said = f"{LLAMA} was on cpu:1 already, and stays there\n"
    assert await run(system, "models", "replicate", LLAMA, "cpu:1") == said
    await with_image(system, LLAMA)
    account = (await value(system, "explain", LLAMA))["account"]
    assert "an operator asked for it on several groups (replicate): it leaves none as not needed" in account
    assert [line.split(" ago")[0].rsplit(" ", 2)[0] for line in account if line.startswith("why")] == [
        "why: activate on cpu:0",
        "why: replicate on cpu:1",
    ]
    assert (
        await run(system, "models", "sleep", LLAMA, "--to", "cold", "--group", "cpu:0") == f"{LLAMA} is cold on cpu:0\n"
    )
    (row,) = [row for row in await value(system, "models", "list") if row["model"] == LLAMA]
    assert row["places"] == ["cpu:1"]
    assert f"{LLAMA} is not on cpu:0" in await run(system, "models", "sleep", LLAMA, "--group", "cpu:0", status=1)
    assert f"{LLAMA} is on cpu:1 already" in await run(system, "models", "replicate", LLAMA, "cpu:1", status=1)


@pytest.mark.parametrize("first", ["cold", None])
async def test_model_brought_down_to_disk_has_no_image(system, first):
    await run(system, "models", "wake", LLAMA)
    await with_image(system, LLAMA)
    if first is not None:
        await run(system, "models", "sleep", LLAMA, "--to", first)
        await system.wait_residency(LLAMA, common_pb2.COLD)
    assert await run(system, "models", "sleep", LLAMA, "--to", "disk") == f"{LLAMA} is on disk\n"
    await system.wait_residency(LLAMA, common_pb2.ON_DISK)
    said = f"{LLAMA} is on disk: there is nothing to bring down"
    assert said in await run(system, "models", "sleep", LLAMA, "--to", "disk", status=1)


async def test_explain_says_why_a_model_is_awake_asleep_nowhere_or_unknown(system):
    await with_image(system, LLAMA)
    text = await run(system, "explain", LLAMA, columns="80")
    assert f"{LLAMA} is active on cpu:0; it came up in " in text and "why: activate on cpu:0" in text
    assert max(map(len, text.splitlines())) <= 80
    await run(system, "models", "sleep", LLAMA)
    await system.wait_residency(LLAMA, common_pb2.HIBERNATING)
    text = await run(system, "explain", LLAMA)
    assert f"{LLAMA} is hibernating on cpu:0" in text and "an operator asked for it" in text
    assert "a request now would bring it up on cpu:0" in text
    told = await value(system, "explain", QWEN)
    assert told["state"] == "on disk" and told["places"] == [] and told["prospect"]["group"] in ("cpu:0", "cpu:1")
    assert told["account"][0].startswith(f"{QWEN} is on no group, on disk")
    assert "no model 'ghost'" in await run(system, "explain", "ghost", status=1)


async def test_explain_says_what_requests_of_a_model_do(system):
    async with streaming(system, LLAMA):
        told = await value(system, "explain", LLAMA)
    assert "requests: 1 running" in told["account"] and {each["group"] for each in told["requests"]} == {"cpu:0"}


async def test_limit_is_set_on_the_group_of_the_model_and_refused_below_its_floor(system):
    await run(system, "models", "wake", LLAMA)
    told = await value(system, "models", "limit", LLAMA, "8MiB")
    assert told["cpu:0"]["state"] == "applied"
    assert "below the floor" in await run(system, "models", "limit", LLAMA, "1KiB", status=1)
    assert "no model 'ghost' in the catalogue" in await run(system, "models", "limit", "ghost", "8MiB", status=1)
    await run(system, "models", "sleep", LLAMA)
    assert "below the floor" in await run(system, "models", "limit", LLAMA, "1KiB", status=1), "asleep as well"
    await run(system, "models", "limit", LLAMA, "none")


async def test_a_model_that_has_requests_is_not_removed(system):
    async with streaming(system, LLAMA):
        assert f"{LLAMA} has requests that run or wait: it is removed by force only" in await run(
            system, "models", "remove", LLAMA, status=1
        )
    assert LLAMA in await run(system, "models", "list")


async def test_a_folder_is_checked_without_adding_it(system):
    folder = str(ROOT / "examples" / "models" / LLAMA)
    told = await value(system, "models", "add", "other", folder, "--check")
    assert told["weights_bytes"] > 0 and not told["added"]
    assert "other" not in await run(system, "models", "list")
    assert "does not exist" in await run(system, "models", "add", "other", f"{folder}/none", "--check", status=1)


async def test_drained_group_loses_its_models_while_they_serve_and_stays_drained_for_a_new_placement(system):
    await with_image(system, QWEN)
    await run(system, "models", "sleep", QWEN)
    expected = await undisturbed(system, LLAMA)
    streams = await ten_streams(system, LLAMA)
    told = await value(system, "drain", "cpu:0")
    assert await asyncio.gather(*streams) == expected
    assert {each["model"]: each["to_group"] for each in told["models"]} == {LLAMA: "cpu:1", QWEN: None}
    system.kill("placement")

    async def knows():
        groups = {group.group: group for group in (await system.placement.cluster()).groups}
        return groups["cpu:0"].reachable and groups["cpu:0"].drained

    await system.until(lambda: quietly(knows), "placement does not know")
    assert "cpu:0 (drained)" in await run(system, "status")
    assert "on cpu:1" in await run(system, "models", "wake", QWEN)
    assert "models may come up on cpu:0 again" in await run(system, "drain", "cpu:0", "--undo")
    assert "no group 'cpu:9'" in await run(system, "drain", "cpu:9", status=1)
    assert await run(system, "models", "move", QWEN, "cpu:0")


async def quietly(question):
    """False while placement starts again."""
    try:
        return await question()
    except PrismError:
        return False


async def test_running_system_has_valid_configuration_and_readable_logs(system):
    files = [str(path) for path in sorted(system.local.state.glob("*.toml"))]
    told = await value(system, "config", "validate", *files)
    assert told["valid"] and len(told["files"]) == 7
    await run(system, "models", "wake", PERL)
    lines = (await run(system, "logs", "--model", PERL, "-n", "1000", "--json")).splitlines()
    assert "model active" in {json.loads(line)["event"] for line in lines}


@contextlib.asynccontextmanager
async def stopped(it, name):
    """Its process stands still meanwhile; its pid."""
    pid = it.system.running[name].pid
    os.kill(pid, signal.SIGSTOP)
    try:
        yield pid
    finally:
        os.kill(pid, signal.SIGCONT)
        await it.until(lambda: healthy(it.system.running[name].spec.probe, PATIENCE_S), f"{name} is not back")


HANGING = [("loader", "loader"), ("balloond", "balloond"), ("keeper", "keeper"), ("gateway", "gateway")]
HANGING += [("placement", "placement"), ("gpu_scheduler-cpu-0", "cpu:0")]


@pytest.mark.parametrize(("process", "service"), HANGING)
async def test_a_stopped_process_is_named_by_status_and_the_others_answer(system, process, service):
    async with stopped(system, process) as pid:
        asked = "--wait", "15", "status"
        told, text = await asyncio.gather(value(system, *asked, status=3), run_apart(system, *asked, status=3))
    problems = {each["service"]: each["problem"] for each in told["services"]}
    assert {*problems} == {*SERVICES} and f"kill -CONT {pid} lets it go on" in problems.pop(service)
    assert {*problems.values()} == {None}
    assert f"does not answer: {service} (" in text and f"its process {pid} is stopped" in " ".join(text.split())


async def test_keeper_that_is_gone_is_named_by_status_until_another_is_there(system):
    async with system.without("keeper"):
        told = await value(system, "status", status=3)
    away = {each["service"]: each["problem"] for each in told["services"] if not each["answers"]}
    assert {*away} == {"keeper"} and "balloond hears nothing of it" in away["keeper"]

    async def all_answer():
        return all(each["answers"] for each in json.loads(await any_status(system, "status", "--json"))["services"])

    await system.until(all_answer, "the new keeper is not found")


async def any_status(it, *arguments):
    result = await asyncio.to_thread(CliRunner().invoke, app, ["--state", str(it.local.state), *arguments])
    return result.stdout


@pytest.fixture
def impatient(monkeypatch):
    """Who is silent for the time of --wait ends what is under way."""
    monkeypatch.setattr(patience, "PATIENCE", 1)


FOLDER = str(ROOT / "examples" / "models" / LLAMA)


@pytest.mark.parametrize(
    ("process", "command", "named"),
    [
        ("loader", ("models", "add", "other", FOLDER, "--check"), "the loader at unix:{state}/loader.sock"),
        ("loader", ("models", "inspect", LLAMA), "the loader at unix:{state}/loader.sock"),
        ("loader", ("explain", LLAMA), "the loader at unix:{state}/loader.sock"),
        ("balloond", ("explain", LLAMA), "balloond at unix:{state}/balloond.sock"),
        ("keeper", ("models", "pin", LLAMA), "the keeper at {state}/keeper.sock"),
        ("keeper", ("explain", LLAMA), "the keeper at {state}/keeper.sock"),
        ("placement", ("models", "list"), "placement at unix:{state}/placement.sock"),
        ("placement", ("drain", "cpu:0"), "placement at unix:{state}/placement.sock"),
    ],
)
async def test_commands_name_the_stopped_process_that_they_need(system, impatient, process, command, named):
    async with stopped(system, process) as pid:
        text = " ".join((await run(system, "--wait", "5", *command, status=3)).split())
    named = named.format(state=system.local.state)
    assert f"{named} does not answer; its process {pid} is stopped, kill -CONT {pid} lets it go on" in text
    assert f"logs/{process}.log" in text


async def test_commands_on_a_model_of_a_stopped_group_end_and_name_its_gpu_scheduler(system, impatient):
    await run(system, "models", "wake", LLAMA)
    scheduler = system.local.scheduler("cpu:0")
    async with stopped(system, scheduler) as pid:
        for command in (("models", "sleep", LLAMA), ("models", "limit", LLAMA, "8MiB"), ("explain", LLAMA)):
            text = " ".join((await run(system, "--wait", "5", *command, status=3)).split())
            assert f"cpu:0 at unix:{system.local.state}/{scheduler}.sock does not answer; its process {pid}" in text


async def test_drain_of_a_stopped_group_happens_when_it_continues(system, impatient):
    scheduler = system.local.scheduler("cpu:0")
    async with stopped(system, scheduler):
        text = await run(system, "--wait", "5", "drain", "cpu:0", status=3)
    assert f"cpu:0 at unix:{system.local.state}/{scheduler}.sock does not answer" in text

    async def drained():
        return "cpu:0 (drained)" in await run(system, "status")

    await system.until(drained, "what was asked for was lost")
    await run(system, "drain", "cpu:0", "--undo")


async def test_limit_with_balloond_stopped_names_balloond(system):
    """The gpu_scheduler's own question, whose time is shorter than what this command waits for."""
    await run(system, "models", "wake", LLAMA)
    async with stopped(system, "balloond"):
        text = await run(system, "models", "limit", LLAMA, "8MiB", status=3)
    assert text == f"prismctl: balloond at unix:{system.local.state}/balloond.sock did not answer in time\n"
    await run(system, "models", "limit", LLAMA, "none")
