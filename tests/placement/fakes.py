"""A cluster of groups that do what they are told, for placement's tests."""

from __future__ import annotations

import asyncio

from placement.actuation.actuator import Actuator
from placement.actuation.drain import Drain
from placement.actuation.history import DecisionHistory
from placement.actuation.reconcile import Reconciler
from placement.cluster.cluster import Cluster
from placement.cluster.follower import StreamFollower
from placement.cluster.routes import Routes
from placement.config import PlacementConfig
from placement.planning.planner import Planner
from protos import common_pb2, gpu_scheduler_pb2, loader_pb2
from services.errors import PrismError

MIB = 1 << 20


class FakeGroup:
    """A gpu_scheduler's client whose group changes residencies at once."""

    def __init__(self, name, capacity=100 * MIB):
        self.address = f"unix:/{name}"
        self.calls = []
        self.drained = []
        self.successors = []
        self.elsewhere = []
        self.fail: PrismError | None = None
        self.held = self.holds = 0
        self.state = gpu_scheduler_pb2.GroupState(group=name, address=self.address)
        self.state.memory.add(device=f"{name}-device", capacity_bytes=capacity, free_bytes=capacity)
        self.tell = lambda: None

    def put(self, model, residency=common_pb2.ACTIVE, **facts):
        self.remove(model)
        self.state.residents.add(model=model, residency=residency, **facts)

    async def set_drained(self, drained):
        self.state.drained = drained
        self.tell()

    async def hold(self):
        self.held += 1
        self.holds += 1
        try:
            yield
        finally:
            self.held -= 1

    def come_up_slowly(self, begun=lambda: None):
        """From now on. (Set when a model was told to come up, behind `begun`; to be set for it to be up.)"""
        bring, asked, up = self.set_residency, asyncio.Event(), asyncio.Event()

        async def slowly(spec, target, *rest, **more):
            if target == common_pb2.ACTIVE:
                begun()
                asked.set()
                await up.wait()
            return await bring(spec, target, *rest, **more)

        self.set_residency = slowly
        return asked, up

    def remove(self, model):
        kept = [resident for resident in self.state.residents if resident.model != model]
        del self.state.residents[:]
        self.state.residents.extend(kept)

    async def set_residency(
        self, spec, target, reason, drain_ms=0, on_progress=None, yields=(), successor="", elsewhere=None
    ):
        self.elsewhere.append(elsewhere)
        self.calls.append((spec.name, common_pb2.Residency.Name(target), [y.model for y in yields]))
        self.drained.append(drain_ms)
        self.successors.append(successor)
        if self.fail is not None:
            raise self.fail
        for y in yields:
            self.put(y.model, y.target)
        if on_progress is not None:
            on_progress(gpu_scheduler_pb2.ResidencyProgress(residency=common_pb2.WAKING))
        if target in (common_pb2.COLD, common_pb2.ON_DISK):
            self.remove(spec.name)
        else:
            self.put(spec.name, target, weights_bytes=spec.weights_bytes)
        self.tell()
        return gpu_scheduler_pb2.ResidencyProgress(residency=target)


class FakeCluster:
    """Groups, a catalogue, and a reconciler over them. `pauses`: those of the reconciler that are not as ever.
    `traffic`: what is known of earlier hours."""

    def __init__(
        self, groups=2, capacity=100 * MIB, silent_s=0.5, most_vanished=1000, pauses=None, traffic=None, **config
    ):
        self.groups = [FakeGroup(f"g{i}", capacity) for i in range(groups)]
        self.time = 1000.0
        config = {"hold_s": 0.0, "first_do_no_harm": False} | config
        settings = PlacementConfig(name="p", listen="unix:p", groups=[], loaders=["unix:l"], **config)
        self.cluster = Cluster(self.groups, self.changed, lambda: self.time, most_vanished)
        self.follower = StreamFollower(self.cluster)
        for group in self.groups:
            group.tell = self.tell
        self.history = DecisionHistory(lambda: self.time)
        self.actuator = Actuator(self.cluster, settings.drain_ms, silent_s=silent_s)
        self.planner = Planner(settings, self.cluster, lambda: self.time, self.actuator.on_their_way, traffic)
        self.reconciler = Reconciler(settings, self.cluster, self.actuator, self.planner, self.history, **pauses or {})
        self.drain = Drain(self.cluster, self.reconciler, self.actuator, self.planner, self.history, settings.drain_ms)
        self.table = self.new_table(self.actuator.leaving)
        self.cluster.heard_catalogue([])
        self.tell()

    def new_table(self, leaving):
        return Routes(self.cluster, self.reconciler.refusal, leaving, self.actuator.removing)

    def changed(self):
        """As the service has it."""
        self.table.renew(self.cluster.news().models, self.reconciler.premises)

    def tell(self):
        for client in self.groups:
            state = gpu_scheduler_pb2.GroupState()
            state.CopyFrom(client.state)
            self.cluster.heard_group(client.address, state)
            self.cluster.changed()

    def routes(self, leaving=None):
        """All, as they are told; `leaving`: models with the group that they leave."""
        table = self.new_table(leaving or {})
        table.renew((), self.reconciler.premises)
        return list(table.message().routes)

    async def heard(self, condition):
        """Returns when the loop has brought it about."""
        while not condition():
            await asyncio.sleep(0)

    def model(self, name, weights=30 * MIB, floor=10 * MIB, quota=1 * MIB, error="", has_image=True, **facts):
        spec = common_pb2.ModelSpec(
            name=name, weights_bytes=weights, floor_bytes=floor, quota_bytes=quota, kv_bytes_per_token=1000, **facts
        )
        entry = loader_pb2.Entry(model=spec, error=error, has_image=has_image)
        self.cluster.heard_catalogue([*self.cluster.catalogue.values(), entry])
        return spec
