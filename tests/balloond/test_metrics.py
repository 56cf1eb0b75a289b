import asyncio
import itertools
from types import SimpleNamespace

from prometheus_client import REGISTRY

from balloond import metrics
from balloond.policy.claims import ClaimPatience, WantedExtents
from balloond.policy.device import DevicePolicy
from balloond.policy.ledger import Booking
from services.rpc.watch import Watched


async def test_metrics_show_the_ledger_of_a_device():
    device = DevicePolicy("cpu:metrics", 100, 1, itertools.count(1), itertools.count(1), ClaimPatience())
    device.book(0, "m", Booking(quota=10))
    device.open("a", "m", "t")
    device.grow(0, "a", 1, WantedExtents("kv", 1, 30))
    device.set_limit(0, "m", 40, 0, 0)
    publishing = asyncio.ensure_future(  # noqa: TID251
        metrics.publish(SimpleNamespace(changed=Watched(None), devices={"cpu:metrics": device}))
    )
    await asyncio.sleep(0)

    def of(name, **labels):
        return REGISTRY.get_sample_value(name, {"device": "cpu:metrics", **labels})

    states = ("leased", "free", "booked", "stranded", "capacity")
    assert [of("prism_device_memory_bytes", state=state) for state in states] == [30, 60, 10, 0, 100]
    held = {kind: of("prism_model_memory_bytes", model="m", kind=kind) for kind in ("weights", "kv", "private")}
    assert held == {"weights": 0, "kv": 30, "private": 10}
    assert of("prism_model_kv_limit_bytes", model="m") == 40
    publishing.cancel()
