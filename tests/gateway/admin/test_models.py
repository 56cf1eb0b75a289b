"""Admins' requests as clients send them: real HTTP, placement as a test has it."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import grpc
import openai
import pytest

from gateway.admin.bodies import ModelEntry
from loader.catalogue.catalogue import CatalogueEntry
from protos import common_pb2, placement_pb2
from services.errors import Conflict
from services.runtime import tasks
from testing.patience import PATIENCE_S
from tests.gateway import fakes
from tests.gateway.conftest import MODEL, World
from tests.gateway.test_app import refusal
from tests.gateway.test_keys_wire import bearer, entry

OPS = bearer("ops")
STEERS = [
    ("POST", "/v1/models"),
    ("DELETE", f"/v1/models/{MODEL}"),
    *(("POST", f"/v1/models/{MODEL}/{action}") for action in ("wake", "sleep", "move?to=g", "pin", "unpin")),
]


@pytest.fixture
def settings(tmp_path: Path) -> dict[str, Any]:
    file = tmp_path / "keys.toml"
    file.write_text(entry("ops", admin=True) + entry("ann") + entry("else", admin=True, models=["else/*"]))
    return {"keys_file": str(file)}


@pytest.fixture
def key() -> str:
    return "ops"


async def test_steering_needs_an_admin_key_that_may_use_the_model(world: World) -> None:
    body = {"name": MODEL, "path": "/models/tiny"}
    for method, path in STEERS:
        refusal(await world.http.request(method, path, json=body), 401)
        denied = await world.http.request(method, path, json=body, headers=bearer("ann"))
        assert refusal(denied, 403)["code"] == "denied"
        elsewhere = await world.http.request(method, path, json=body, headers=bearer("else"))
        refusal(elsewhere, 404 if MODEL in path else 403)
    body = {"name": "else/tiny", "path": "/models/tiny", "aliases": ["default"]}
    elsewhere = await world.http.post("/v1/models", json=body, headers=bearer("else"))
    assert "not for models of the name 'default'" in refusal(elsewhere, 403)["message"]


async def test_waking_that_takes_long_is_under_way_and_goes_on_without_its_client(world: World) -> None:
    chosen, up = asyncio.Event(), fakes.place(world.groups[0])

    async def activate(request: placement_pb2.ActivateRequest) -> placement_pb2.Place:
        await chosen.wait()
        return up

    world.placement.activate = activate
    await world.publish(world.route(), key="ops")
    asked = await world.http.post(f"/v1/models/{MODEL}/wake?wait_s=0", headers=OPS)
    assert (asked.status_code, asked.headers["location"]) == (202, f"/v1/models/{MODEL}")
    assert asked.json()["residency"] == "cold"
    waiting = tasks.spawn(world.http.post(f"/v1/models/{MODEL}/wake", headers=OPS), "wake")
    await world.placement.activated(2)
    chosen.set()
    await world.publish(world.route(fakes.place(world.groups[0], common_pb2.WAKING)), key="ops")
    assert not waiting.done()
    await world.publish(world.route(up), key="ops")
    async with asyncio.timeout(PATIENCE_S):
        woken = await waiting
    assert (woken.status_code, woken.json()["residency"], woken.json()["groups"]) == (200, "active", [up.group])
    again = await world.http.post(f"/v1/models/{MODEL}/wake", headers=OPS)
    assert again.status_code == 200 and len(world.placement.activations) == 2, "it is up"


async def test_what_placement_refuses_has_its_words_and_a_status_of_its_own(world: World) -> None:
    await world.publish(world.route(), key="ops")
    for code, status, said in (
        (grpc.StatusCode.FAILED_PRECONDITION, 409, "not_possible"),
        (grpc.StatusCode.RESOURCE_EXHAUSTED, 503, "no_room"),
        (grpc.StatusCode.ABORTED, 503, "not_now"),
    ):
        world.placement.refusal = (code, "12 MiB are free, it needs 13 MiB")
        error = refusal(await world.http.post(f"/v1/models/{MODEL}/wake", headers=OPS), status)
        assert (error["code"], error["message"]) == (said, "12 MiB are free, it needs 13 MiB")


async def test_wrong_parameter_of_an_admin_is_named(world: World) -> None:
    for method, path, field in (
        ("POST", f"/v1/models/{MODEL}/wake?wait_s=601", "wait_s"),
        ("POST", f"/v1/models/{MODEL}/wake?wait_s=nan", "wait_s"),
        ("POST", f"/v1/models/{MODEL}/sleep?to=bed", "to"),
        ("POST", f"/v1/models/{MODEL}/move", "to"),
        ("DELETE", f"/v1/models/{MODEL}?force=maybe", "force"),
        ("POST", f"/v1/models/{MODEL}/sleep?too=cold", "too"),
        ("POST", "/v1/models", "path"),
    ):
        body = {"name": "m"} if path == "/v1/models" else None
        assert refusal(await world.http.request(method, path, json=body, headers=OPS), 400)["param"] == field


async def test_unknown_key_of_an_admins_body_or_url_has_the_nearest_named(world: World) -> None:
    asked = await world.http.post("/v1/models", json={"name": "m", "path": "/m", "pinnd": True}, headers=OPS)
    assert "'pinned'" in refusal(asked, 400)["message"]
    asked = await world.http.post(f"/v1/models/{MODEL}/sleep?too=cold", headers=OPS)
    assert "'to'" in refusal(asked, 400)["message"]


async def test_sleep_behind_another_change_is_under_way_and_done_after_it(world: World) -> None:
    asked, ended, slept = asyncio.Event(), asyncio.Event(), asyncio.Event()

    async def evict(request: placement_pb2.EvictRequest) -> placement_pb2.EvictResponse:
        if not ended.is_set():
            asked.set()
            raise Conflict("m is on its way")
        slept.set()
        return placement_pb2.EvictResponse(residency=request.target)

    world.placement.evict = evict
    await world.publish(world.route(), key="ops")
    answer = await world.http.post(f"/v1/models/{MODEL}/sleep?wait_s=0&to=cold", headers=OPS)
    assert answer.status_code == 202
    async with asyncio.timeout(PATIENCE_S):
        await asked.wait()
        ended.set()
        await slept.wait()


async def test_openai_client_deletes_a_model(world: World) -> None:
    client = world.openai.with_options(api_key="ops")
    with pytest.raises(openai.NotFoundError):
        await client.models.delete("org/none")
    with pytest.raises(openai.InternalServerError, match="not implemented"):  # by the scripted placement
        await client.models.delete(MODEL)


def test_entry_over_http_has_all_keys_of_the_catalogue_and_says_them_to_placement() -> None:
    checks = ("default", "enum", "minimum", "exclusiveMaximum", "anyOf")
    entry, listed = (
        {key: {check: of.get(check) for check in checks} for key, of in kind.model_json_schema()["properties"].items()}
        for kind in (ModelEntry, CatalogueEntry)
    )
    assert entry == listed
    given = ModelEntry(name="n", path="/n", ttft_ms=1, tpot_ms=2, aliases=["o"], devices=2, quota_bytes=0)
    slo = common_pb2.Slo(ttft_ms=1, tpot_ms=2)
    listing = common_pb2.ModelListing(name="n", path="/n", aliases=["o"], devices=2, quota_bytes=0, default_slo=slo)
    assert given.listing() == listing
    assert not ModelEntry(name="n", path="/n").listing().HasField("quota_bytes")


async def test_model_is_brought_up_on_one_group_more_and_taken_off_one_over_http(world: World) -> None:
    first, second = (fakes.place(group) for group in world.groups)
    await world.publish(world.route(first), key="ops")
    asked = tasks.spawn(world.http.post(f"/v1/models/{MODEL}/replicate?to={second.group}", headers=OPS), "replicate")
    while not world.placement.steered:
        await asyncio.sleep(0)
    await world.publish(world.route(first, second), key="ops")
    answer = await asked
    assert (answer.status_code, answer.json()["groups"]) == (200, [first.group, second.group])
    world.placement.refusal = (grpc.StatusCode.FAILED_PRECONDITION, "it is on its only group already")
    again = await world.http.post(f"/v1/models/{MODEL}/replicate?to={second.group}", headers=OPS)
    assert again.status_code == 200, "it is there"
    again = await world.http.post(f"/v1/models/{MODEL}/replicate?to=another", headers=OPS)
    assert again.status_code == 409 and "its only group" in again.text
    world.placement.refusal = None
    asked = tasks.spawn(world.http.post(f"/v1/models/{MODEL}/sleep?group={first.group}", headers=OPS), "sleep")
    while len(world.placement.steered) < 2:
        await asyncio.sleep(0)
    await world.publish(world.route(second), key="ops")
    answer = await asked
    assert (answer.status_code, answer.json()["groups"]) == (200, [second.group])
    assert world.placement.steered == [
        placement_pb2.ReplicateRequest(model=MODEL, to_group=second.group),
        placement_pb2.LeaveGroupRequest(model=MODEL, target=common_pb2.HIBERNATING, group=first.group),
    ]
    world.placement.refusal = (grpc.StatusCode.FAILED_PRECONDITION, "it is not there")
    again = await world.http.post(f"/v1/models/{MODEL}/sleep?group={first.group}", headers=OPS)
    assert again.status_code == 200, "it has left"
