"""The whole system with echo engines: everything but the forward pass is real."""

import asyncio
import contextlib
import json
import os
import shutil
import signal

import pytest
import pytest_asyncio
from typer.testing import CliRunner

from balloond.client import WARM_ENGINES, BalloondClient
from gateway.__main__ import build
from gateway.access import keys
from gateway.config import GatewayConfig
from gpu_scheduler.engines.echo.rule import embedding
from loader.client import LoaderClient
from loader.copies.handoff_client import HandoffClient
from prismctl.__main__ import app
from protos import common_pb2
from services.runtime import tasks
from services.service import Service
from testing.patience import PATIENCE_S
from testing.ports import free_port
from testing.systems.local import FOLDER, MODELS, world

pytestmark = pytest.mark.asyncio(loop_scope="module")
PROMPT = list(range(20, 60))
ADMIN = {"authorization": "Bearer ops"}
KEYS = {"ops": "admin = true\n", "ann": ""}
DEVICES = {"cpu:0": 32 << 20, "cpu:1": 32 << 20}


def slow_world():
    """Streams of 20 ms steps, so that there is a middle to be killed in."""
    return world("echo", options={"step_ms": "20"}, idle_s=0.2, devices=DEVICES)


@pytest_asyncio.fixture(loop_scope="module")
async def fresh():
    async with slow_world() as it:
        yield it


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def running():
    async with slow_world() as it:
        yield it


@pytest_asyncio.fixture(loop_scope="module")
async def slow(running):
    """One system for all tests that kill none of its processes: starting it is what takes time."""
    await running.rest()
    return running


async def ten_streams(it, model, tokens=60):
    """Ten open streams, all past their first token; [(task)]."""
    started = [asyncio.Event() for _ in range(10)]
    streams = [
        asyncio.get_running_loop().create_task(it.stream(model, [7 + i, *PROMPT], tokens, event))
        for i, event in enumerate(started)
    ]
    async with asyncio.timeout(PATIENCE_S):
        for event in started:
            await event.wait()
    return streams


async def undisturbed(it, model, tokens=60):
    return await asyncio.gather(*(it.stream(model, [7 + i, *PROMPT], tokens) for i in range(10)))


@contextlib.asynccontextmanager
async def gateway_with_keys(it):
    """A gateway in this process, in front of a running system, with an admin's key and another's; its address."""
    folder = it.local.state / "keyed"
    folder.mkdir()
    entries = (f'[[key]]\nname = "{name}"\nhash = "{keys.digest(name)}"\n{more}' for name, more in KEYS.items())
    (folder / "keys.toml").write_text("".join(entries))
    http = f"127.0.0.1:{free_port()}"
    config = GatewayConfig(
        name="keyed",
        listen=f"unix:{folder}/gateway.sock",
        http=http,
        placement=it.local.unix("placement"),
        keys_file=str(folder / "keys.toml"),
    )
    service = Service(config)
    await build(service)
    try:
        yield f"http://{http}"
    finally:
        await service._end()
        shutil.rmtree(folder)


async def test_requests_are_answered_streamed_and_whole_for_all_models(slow):
    for model in MODELS:
        whole = await slow.complete(model, PROMPT, 8)
        text, usage, finish = await slow.stream(model, PROMPT, 8)
        assert text == whole["choices"][0]["text"]
        assert usage["prompt_tokens"] == len(PROMPT) and usage["completion_tokens"] == 8
        assert finish == whole["choices"][0]["finish_reason"] == "length"
    status, models = await slow.get("/v1/models")
    assert status == 200 and {model["id"] for model in models["data"]} == set(MODELS)


async def test_an_engine_killed_under_ten_streams_pauses_them_and_changes_no_token(fresh):
    expected = await undisturbed(fresh, MODELS[0])
    streams = await ten_streams(fresh, MODELS[0])
    resident = await fresh.resident(MODELS[0])
    assert resident is not None
    # The warm engines are killed too: the next one has to start from nothing.
    for pid in fresh.engine_pids():
        os.kill(pid, signal.SIGKILL)
    assert await asyncio.gather(*streams) == expected


async def test_balloond_killed_under_ten_streams_changes_no_answer(fresh):
    expected = await undisturbed(fresh, MODELS[0])
    streams = await ten_streams(fresh, MODELS[0])
    fresh.kill("balloond")
    assert await asyncio.gather(*streams) == expected
    # And its successor knows what its predecessor knew: memory can still move.
    await fresh.complete(MODELS[1], PROMPT, 8)
    await fresh.complete(MODELS[2], PROMPT, 8)


async def test_a_killed_gpu_scheduler_and_a_killed_placement_lose_no_stream(fresh):
    expected = await undisturbed(fresh, MODELS[0])
    streams = await ten_streams(fresh, MODELS[0])
    group, _ = await fresh.resident(MODELS[0])
    fresh.kill("placement")
    fresh.kill(fresh.local.scheduler(group))
    assert await asyncio.gather(*streams) == expected


async def test_a_model_moves_to_the_other_device_while_it_streams(slow):
    expected = await undisturbed(slow, MODELS[0])
    streams = await ten_streams(slow, MODELS[0])
    source, _ = await slow.resident(MODELS[0])
    target = next(device for device in slow.local.devices if device != source)
    await slow.migrate(MODELS[0], target)
    assert await asyncio.gather(*streams) == expected
    assert (await slow.resident(MODELS[0]))[0] == target


@pytest_asyncio.fixture(loop_scope="module")
async def imaged(slow):
    """A model that has streamed since its image was made: every group has heard of that."""
    client = LoaderClient(slow.local.unix("loader"))
    await slow.complete(MODELS[0], PROMPT, 2)

    async def has_image():
        return (await client.state(MODELS[0])).entry.has_image

    await slow.until(has_image, "no image was made")
    await client.close()
    await slow.complete(MODELS[0], PROMPT, 60)
    return slow


async def test_a_move_takes_the_weights_from_the_device_that_is_left(imaged):
    assert (await imaged.measured(MODELS[0])).weights_from == ["checkpoint"]
    expected = await undisturbed(imaged, MODELS[0])
    source, _ = await imaged.resident(MODELS[0])
    target = next(device for device in imaged.local.devices if device != source)
    for left, to in ((source, target), (target, source)):
        streams = await ten_streams(imaged, MODELS[0])
        await imaged.migrate(MODELS[0], to)
        assert await asyncio.gather(*streams) == expected
        assert (await imaged.measured(MODELS[0])).weights_from == [left]


async def test_weights_that_went_bad_on_the_device_that_is_left_are_taken_from_the_image(imaged):
    expected = await undisturbed(imaged, MODELS[0])
    source, _ = await imaged.resident(MODELS[0])
    target = next(device for device in imaged.local.devices if device != source)
    await scribble_over_weights(imaged, source)
    await imaged.migrate(MODELS[0], target)
    assert (await imaged.measured(MODELS[0])).weights_from == ["image"]
    assert await undisturbed(imaged, MODELS[0]) == expected


async def scribble_over_weights(it, device):
    """Of the one lease that a device has, as a loader that is out of its mind would do it."""
    balloond = BalloondClient(it.local.unix("balloond"))
    async with contextlib.aclosing(balloond.watch()) as states:
        state = await anext(aiter(states))
    (lease,) = next(one for one in state.devices if one.device == device).leases
    await balloond.close()
    handoff = HandoffClient(str(it.local.state / "handoff.sock"), answer_timeout_s=PATIENCE_S)
    running = tasks.spawn(handoff.run(), "handoff")
    async with handoff.borrowed(lease.lease_id) as extents:
        os.pwrite(extents[0].fd, b"other bytes", 100)
    await tasks.cancel(running)


async def test_an_evicted_model_hibernates_and_wakes_at_its_next_request(slow):
    before = await slow.complete(MODELS[0], PROMPT, 8)
    await slow.evict(MODELS[0], common_pb2.HIBERNATING)
    await slow.wait_residency(MODELS[0], common_pb2.HIBERNATING)
    after = await slow.complete(MODELS[0], PROMPT, 8)
    assert after["choices"] == before["choices"]
    await slow.wait_residency(MODELS[0], common_pb2.ACTIVE)
    measured = await slow.measured(MODELS[0])
    assert measured.cold_s > 0 and measured.wake_s > 0


async def test_explain_says_why_a_model_is_where_it_is(slow):
    await slow.complete(MODELS[0], PROMPT, 2)

    async def carried_out():
        """It serves before its activation has ended."""
        decisions = await slow.placement.explain(MODELS[0])
        return decisions if decisions[0].outcome != "under way" else None

    decisions = await slow.until(carried_out, "nobody says what became of it")
    assert decisions[0].action == "activate" and decisions[0].candidates
    assert decisions[0].outcome.startswith("done in")


BAD = [
    ({"model": "nobody", "prompt": "x"}, 404, "nobody"),
    ({"model": MODELS[0], "prompt": "x", "n": 0}, 400, "n"),
    ({"model": MODELS[0], "prompt": "x", "max_tokens": 10**6}, 400, "max_tokens"),
    ({"model": MODELS[0], "prompt": [5] * 5000}, 400, "prompt"),
    ({"model": MODELS[0], "prompt": "x", "temperature": "hot"}, 400, "temperature"),
]


async def test_bad_requests_are_refused_by_field_and_activate_no_model(slow):
    async def decided():
        return [(decision.model, decision.action) for decision in await slow.placement.explain()]

    before = await decided()
    for body, status, names in BAD:
        got, answer = await slow.post("/v1/completions", body)
        assert got == status, answer
        assert names in json.dumps(answer["error"])
    assert await decided() == before, "no model was woken for a bad request"


async def prismctl(it, *arguments):
    """What the command printed; it must end with 0, or print why not as one line."""
    result = await asyncio.to_thread(
        CliRunner().invoke, app, ["--state", str(it.local.state), "--wait", "60", *arguments]
    )
    if result.exit_code:
        assert (result.exit_code, result.output.count("\n")) == (1, 1), result.output
    return result.output


async def test_a_model_is_added_serves_and_is_removed_while_the_system_runs(slow, tmp_path):
    folder = tmp_path / "tiny"
    assert "its folder does not exist" in await prismctl(slow, "models", "add", "tiny", str(folder))
    folder.mkdir()
    assert "its folder is empty" in await prismctl(slow, "models", "add", "tiny", str(folder))
    shutil.copytree(FOLDER / MODELS[1], folder, dirs_exist_ok=True)
    assert "is taken by the model at" in await prismctl(slow, "models", "add", MODELS[0], str(folder))
    refused = await prismctl(slow, "models", "add", "tiny", str(folder), "--quota", "1GiB")
    assert "engine quota 1,073,741,824 = " in refused and "the largest group" in refused

    assert "tiny is added" in await prismctl(slow, "models", "add", "tiny", str(folder), "--pinned")
    await slow.until(lambda: listed(slow, "tiny"), "the gateway never heard of it")
    expected = await undisturbed(slow, "tiny")
    rows = {row["model"]: row for row in json.loads(await prismctl(slow, "models", "list", "--json"))}
    assert rows["tiny"]["state"] == "active" and rows["tiny"]["path"] == str(folder) and rows["tiny"]["pinned"]

    # What runs finishes; who comes later is told that there is no such model.
    streams = await ten_streams(slow, "tiny")
    assert "pinned" in await prismctl(slow, "models", "remove", "tiny")
    assert await prismctl(slow, "models", "remove", "tiny", "--force") == "tiny is removed\n"
    assert await asyncio.gather(*streams) == expected
    status, answer = await slow.post("/v1/completions", {"model": "tiny", "prompt": PROMPT, "max_tokens": 1})
    assert status == 404, answer
    assert await slow.resident("tiny") is None
    assert "no model 'tiny'" in await prismctl(slow, "models", "remove", "tiny")

    async def all_free():
        groups = (await slow.placement.cluster()).groups
        return {group.group: group.free_bytes for group in groups} == slow.local.devices

    await slow.until(all_free, "its memory never was free again")


async def test_sentence_transformers_model_makes_embeddings_beside_streams_of_others(slow, tmp_path):
    folder = tmp_path / "embedder"
    shutil.copytree(FOLDER / MODELS[1], folder)
    (folder / "modules.json").write_text(
        '[{"type": "sentence_transformers.models.Pooling", "path": "1_Pooling"},'
        ' {"type": "sentence_transformers.models.Normalize", "path": "2_Normalize"}]'
    )
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling" / "config.json").write_text('{"pooling_mode_lasttoken": true}')
    config = json.loads((folder / "config.json").read_text()) | {"is_matryoshka": True}
    (folder / "config.json").write_text(json.dumps(config))
    dimensions, context = config["hidden_size"], config["max_position_embeddings"]
    assert "embedder is added" in await prismctl(slow, "models", "add", "embedder", str(folder), "--ttft-ms", "60000")
    await slow.until(lambda: listed(slow, "embedder"), "the gateway never heard of it")
    expected = await undisturbed(slow, MODELS[0])

    async def vectors(given, **more):
        status, answer = await slow.post("/v1/embeddings", {"model": "embedder", "input": given, **more})
        assert status == 200, answer
        return [one["embedding"] for one in answer["data"]]

    async def all_right():
        lists = [[n + 3, *PROMPT[: n % 30], n + 5] for n in range(200)] + [[7] * context]
        for found, ids in zip(await vectors(lists), lists, strict=True):
            assert found == pytest.approx(embedding(ids, dimensions), abs=1e-6)

    streams = await ten_streams(slow, MODELS[0])
    await asyncio.gather(all_right(), all_right())
    assert await asyncio.gather(*streams) == expected
    (short,) = await vectors("hello", dimensions=3)
    assert len(short) == 3

    os.kill((await slow.measured("embedder")).engine_pid, signal.SIGKILL)
    await all_right()
    await slow.evict("embedder", common_pb2.HIBERNATING)
    await all_right()
    assert (await slow.measured("embedder")).ttft_met > 0

    for path, body, param in (
        ("completions", {"model": "embedder", "prompt": "a"}, "model"),
        ("embeddings", {"model": MODELS[0], "input": "a"}, "model"),
        ("embeddings", {"model": "embedder", "input": [7] * (context + 1)}, "input"),
        ("embeddings", {"model": "embedder", "input": "a", "dimensions": dimensions + 1}, "dimensions"),
    ):
        status, answer = await slow.post(f"/v1/{path}", body)
        assert (status, answer["error"]["param"]) == (400, param), answer
    (card,) = [one for one in (await slow.get("/v1/models"))[1]["data"] if one["id"] == "embedder"]
    assert (card["task"], card["embedding_dimensions"]) == ("embed", dimensions)
    assert await prismctl(slow, "models", "remove", "embedder", "--force") == "embedder is removed\n"


async def listed(it, model):
    return (await it.get(f"/v1/models/{model}"))[0] == 200


async def booked(it):
    """Quotas by model on the only device."""
    balloond = BalloondClient(it.local.unix("balloond"))
    try:
        (state,) = (await balloond.inspect()).devices
        return {booking.model: booking.quota_bytes for booking in state.bookings}
    finally:
        await balloond.close()


async def kept_is(it, nbytes):
    return (await booked(it)).get(WARM_ENGINES, 0) == nbytes


async def test_memory_kept_by_engines_without_a_model_is_booked_and_gives_way_to_a_model():
    kept = 13 << 20
    models = {MODELS[0]: {}, MODELS[1]: {}, MODELS[2]: {"quota_bytes": 16 << 20}}
    one = {"cpu:0": 32 << 20}
    async with world("echo", models, options={"kept_bytes": str(kept)}, devices=one, warm=2) as it:
        for model in MODELS[:2]:
            await it.complete(model, PROMPT, 8)
        for number, model in enumerate(MODELS[:2], start=1):
            await it.evict(model, common_pb2.COLD)
            await it.until(lambda number=number: kept_is(it, number * kept), "what they keep is not booked")
        # One of the two engines is the model's own now, and beside what the other keeps there is no room for it.
        await it.complete(MODELS[2], PROMPT, 8)
        assert MODELS[2] in await booked(it)
        await it.until(lambda: kept_is(it, 0), "the other engine did not give way")


async def test_memory_kept_by_engines_of_a_killed_gpu_scheduler_is_released():
    kept = 5 << 20
    async with world("echo", options={"kept_bytes": str(kept)}, devices={"cpu:0": 32 << 20}) as it:
        await it.complete(MODELS[0], PROMPT, 8)
        await it.evict(MODELS[0], common_pb2.COLD)
        await it.until(lambda: kept_is(it, kept), "what it keeps is not booked")
        it.kill(it.local.scheduler("cpu:0"))
        await it.until(lambda: kept_is(it, 0), "what nobody keeps is still booked")


async def test_models_more_than_engines_are_served_one_after_another():
    named = {f"m{number}": {"path": str(FOLDER / MODELS[number % 3])} for number in range(5)}
    async with world("echo", named, engines=2, devices={"cpu:0": 256 << 20}) as it:
        for model in [*named, *reversed(named)]:
            assert await it.complete(model, PROMPT, 8)
        reasons = [decision.reason for decision in await it.placement.explain() if decision.action == "go cold"]
        assert reasons and all("an engine for" in reason for reason in reasons)


async def test_admin_adds_wakes_pins_puts_to_sleep_and_removes_a_model_over_http(slow):
    entry = {"name": "extra", "path": str(FOLDER / MODELS[0]), "engine": "echo", "aliases": ["gpt-4o", "default"]}
    async with gateway_with_keys(slow) as base:

        async def ask(method, path, body=None, status=200, **headers):
            headers = headers or ADMIN
            async with slow.http.request(method, f"{base}/v1/models{path}", json=body, headers=headers) as answer:
                told = await answer.json()
                assert answer.status == status, told
                return told

        added = await ask("POST", "", entry)
        assert (added["id"], added["aliases"], added["residency"]) == ("extra", ["gpt-4o", "default"], "on_disk")
        assert (await ask("POST", "", entry))["id"] == "extra"
        taken = await ask("POST", "", entry | {"name": "other"}, 409)
        assert "the alias 'gpt-4o' of 'other' is given twice: 'extra' has it" in taken["error"]["message"]
        for _ in range(2):
            woken = await ask("POST", "/default/wake")
            assert woken["residency"] == "active"
        (other,) = DEVICES.keys() - set(woken["groups"])
        for _ in range(2):
            assert (await ask("POST", f"/extra/move?to={other}"))["groups"] == [other]
        body = {"model": "gpt-4o", "prompt": PROMPT, "max_tokens": 4}
        async with slow.http.post(f"{base}/v1/completions", json=body, headers=ADMIN) as answer:
            assert (await answer.json())["model"] == "extra"
        assert (await ask("POST", "/extra/pin"))["image_pinned"]
        for _ in range(2):
            down = await ask("POST", "/extra/sleep?to=hibernating")
            assert down["residency"] == "hibernating", down["reason"]
        assert "is pinned" in (await ask("POST", "/extra/sleep?to=disk", status=409))["error"]["message"]
        assert "is pinned" in (await ask("DELETE", "/extra", status=409))["error"]["message"]
        assert not (await ask("POST", "/extra/unpin"))["image_pinned"]
        assert (await ask("POST", "/extra/sleep?to=disk"))["residency"] == "on_disk"
        assert "remove 'extra' by its name" in (await ask("DELETE", "/gpt-4o", status=400))["error"]["message"]
        assert await ask("DELETE", "/extra") == {"id": "extra", "object": "model", "deleted": True}
        for name in ("extra", "gpt-4o"):
            await ask("DELETE", f"/{name}", status=404)
            await ask("GET", f"/{name}", status=404)
