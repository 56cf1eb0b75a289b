"""The page's JSON."""

from __future__ import annotations

from math import inf

import orjson
from prometheus_client import CollectorRegistry, Counter

from gateway.routing.routes import decode
from gateway.ui.look import ServiceReply
from gateway.ui.state import attainment, document
from protos import balloond_pb2, common_pb2, gpu_scheduler_pb2, placement_pb2
from tests.gateway import fakes


def device() -> balloond_pb2.DeviceState:
    return balloond_pb2.DeviceState(
        device="cuda:0",
        capacity_bytes=1000,
        free_bytes=300,
        leased_bytes=600,
        booked_bytes=80,
        stranded_bytes=20,
        leases=[
            balloond_pb2.LeaseState(
                model="a", weights_bytes=400, kv_bytes=200, kv_used_bytes=120, kv_cached_bytes=50, kv_reserve_bytes=30
            )
        ],
        bookings=[balloond_pb2.Booking(model="a", quota_bytes=60), balloond_pb2.Booking(model="b", quota_bytes=20)],
    )


def told(*requests: gpu_scheduler_pb2.QueuedRequest, heard: bool = True, waiting: int = 0) -> ServiceReply:
    group = placement_pb2.Group(
        group="g", reachable=True, pressure=inf, memory=[device()], capacity_bytes=1000, free_bytes=300
    )
    group.models.add(model="a", residency=common_pb2.ACTIVE, waiting=waiting, running=2)
    decision = placement_pb2.Decision(age_s=2.0, model="a", action="activate", group="g", reason="r", took_s=0.5)
    queues = {"g": gpu_scheduler_pb2.QueueState(requests=requests)} if heard else {}
    return ServiceReply(10.0, placement_pb2.Cluster(groups=[group]), [decision], queues)


def test_ui_state_accounts_for_every_byte_of_a_device() -> None:
    (group,) = document(told(), "", 10.0, [], [])["groups"]
    (shown,) = group["devices"]
    parts = ("weights_bytes", "kv_used_bytes", "kv_cached_bytes", "kv_reserve_bytes")
    owned = sum(owner[part] for owner in shown["owners"] for part in parts)
    assert owned + shown["private_bytes"] + shown["stranded_bytes"] + shown["free_bytes"] == shown["capacity_bytes"]
    assert [(owner["model"], owner["private_bytes"]) for owner in shown["owners"]] == [("a", 60), ("b", 20)]


def test_ui_state_with_a_report_older_than_the_ledger_has_no_negative_kv_reserve() -> None:
    state = told()
    (lease,) = state.cluster.groups[0].memory[0].leases
    lease.kv_bytes = 130
    owner = document(state, "", 10.0, [], [])["groups"][0]["devices"][0]["owners"][0]
    assert [owner[f"kv_{part}_bytes"] for part in ("used", "cached", "reserve")] == [120, 10, 0]


def test_ui_state_queue_counts_late_requests_and_least_slack() -> None:
    queued = gpu_scheduler_pb2.QueuedRequest
    state = told(
        queued(model="a", place="running", slack_s=-9.0),
        queued(model="a", place="on time 1, model waking", slack_s=0.25),
        queued(model="a", place="waiting", slack_s=inf),
        queued(model="a", place="second 1", slack_s=-1.5),
        waiting=3,
    )
    (model,) = document(state, "", 10.0, [], [])["groups"][0]["models"]
    assert (model["waiting"], model["late"], model["least_slack_s"], model["running"]) == (3, 1, -1.5, 2)


def test_ui_state_of_an_unknown_queue_has_no_late_count_and_no_slack() -> None:
    (model,) = document(told(heard=False, waiting=3), "", 10.0, [], [])["groups"][0]["models"]
    assert (model["waiting"], model["late"], model["least_slack_s"]) == (3, None, None)


def test_ui_state_ages_while_placement_is_away() -> None:
    now = document(told(), "gone", 14.0, [], [])
    assert now["placement"] == {"away": "gone", "age_s": 4.0}
    assert now["decisions"][0]["age_s"] == 6.0 and now["decisions"][0]["took_s"] == 0.5
    never = document(None, "gone", 14.0, [], [])
    assert never["placement"] == {"away": "gone", "age_s": None} and never["groups"] == []


def test_ui_state_writes_infinite_pressure_as_a_word() -> None:
    told_ = orjson.loads(orjson.dumps(document(told(), "", 10.0, [], [])))
    assert told_["groups"][0]["pressure"] == "infinite"


def test_ui_state_has_the_models_of_the_routes() -> None:
    broken = decode(fakes.route("x", "/x", residency=common_pb2.ERROR, error="no config.json", aliases=["y"]))
    said = {"model": "x", "aliases": ["y"], "state": "error", "error": "no config.json"}
    flags = {**dict.fromkeys(("pinned", "image_pinned", "unverified"), False), "generates": True, "base": None}
    assert document(None, "", 0.0, [broken], [])["models"] == [said | flags]


def test_ui_state_has_the_step_of_a_model_that_comes_up_and_none_of_others() -> None:
    state = told()
    assert document(state, "", 10.0, [], [])["groups"][0]["models"][0]["waking"] is None
    progress = common_pb2.Progress(step="copying weights", done=3, total=12, unit="bytes", per_s=1.5)
    (group,) = state.cluster.groups
    group.models[0].MergeFrom(placement_pb2.GroupModel(progress=progress, waking_s=2.04, kernels_compiled=1))
    said = {"step": "copying weights", "done": 3, "total": 12, "unit": "bytes", "per_s": 1.5, "left_s": None}
    (model,) = document(state, "", 10.0, [], [])["groups"][0]["models"]
    assert model["waking"] == said | {"seconds": 2.0, "kernels": 1}


def test_ui_state_counts_targets_by_model() -> None:
    slo = Counter("slo", "of a test", ["model", "target", "met"], registry=CollectorRegistry())
    slo.labels("a", "ttft", "true").inc(3)
    slo.labels("a", "ttft", "false").inc()
    slo.labels("b", "tpot", "false").inc(2)
    assert attainment(slo.collect()) == {
        "a": {"ttft": {"met": 3, "missed": 1}},
        "b": {"tpot": {"met": 0, "missed": 2}},
    }
