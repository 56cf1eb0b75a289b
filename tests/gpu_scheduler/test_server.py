"""Tests of the gRPC methods of a group: arguments that are accepted, and arguments that are refused by name."""

from types import SimpleNamespace

import pytest

from gpu_scheduler.residents import Residents
from gpu_scheduler.server import GpuSchedulerServicer
from protos import balloond_pb2, common_pb2, gpu_scheduler_pb2
from services.errors import Invalid

FLOOR = 1 << 20


class Devices:
    """Takes every limit, as balloond does of a model that sleeps: its floor is not booked."""

    def __init__(self):
        self.limits = []

    async def set_limit(self, model, nbytes):
        self.limits.append(nbytes)
        return balloond_pb2.SetLimitResponse(state=balloond_pb2.APPLIED)


@pytest.mark.parametrize("residency", [common_pb2.ACTIVE, common_pb2.HIBERNATING])
async def test_a_limit_below_the_floor_is_refused_whether_or_not_the_model_sleeps(residency):
    devices, residents = Devices(), Residents(lambda _resident: None)
    residents.enter(common_pb2.ModelSpec(name="m", floor_bytes=FLOOR, devices=2)).residency = residency
    rest = dict.fromkeys(("intake", "dispatcher", "residency", "handover", "report", "leaving", "changes"))
    servicer = GpuSchedulerServicer(devices=devices, residents=residents, **rest)

    async def limit(nbytes):
        await servicer.SetLimit(gpu_scheduler_pb2.SetLimitRequest(model="m", bytes=nbytes), SimpleNamespace())

    with pytest.raises(Invalid, match=f"{FLOOR - 1:,} bytes is below the floor of m, {FLOOR:,} bytes"):
        await limit(FLOOR - 1)
    assert devices.limits == [] and residents.operator_limits == {}
    await limit(FLOOR)
    assert devices.limits == [FLOOR // 2] and residents.operator_limits == {"m": FLOOR}
    await limit(-1)
    assert devices.limits == [FLOOR // 2, -1] and residents.operator_limits == {}
