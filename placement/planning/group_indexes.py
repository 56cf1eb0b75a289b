"""What is known of the groups, in the policy's terms and kept between decisions: token rates, demands, and residents.

A group's facts are made anew when it reports, when the demand of one of its models changes, and when one of its models
has been idle, or awake, for so long that it may leave. A group reports how long that was, so placement adds the time
since the report.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping
from math import inf
from typing import TypeVar

from balloond.client import WARM_ENGINES
from kv_kinds import messages
from placement.cluster.cluster import PRESENT, Cluster, HeardGroup, Measured
from placement.config import PlacementConfig
from placement.planning.traffic_record import TrafficRecord
from placement.policy import kvpr
from placement.policy.assignment.foreseen import foreseen
from placement.policy.expectations import Expectations
from placement.policy.kvpr import Group
from placement.policy.lifecycle.decisions import PlacedModel, durations
from placement.policy.lifecycle.eligibility import eligibility_fingerprint, holds_s
from placement.policy.lifecycle.group_index import GroupIndex
from placement.policy.outcomes import Outcomes, will_return
from placement.policy.replication import Replica, Replication
from placement.policy.traffic import TrafficCounts
from placement.policy.window import RateWindow
from protos import balloond_pb2, common_pb2, gpu_scheduler_pb2, loader_pb2

_T = TypeVar("_T")
_NOTHING = (0, 0, 0, 0)


class GroupIndexes:
    """One GroupIndex for each size of group."""

    def __init__(
        self,
        config: PlacementConfig,
        cluster: Cluster,
        now: Callable[[], float],
        on_their_way: Callable[[], Mapping[str, HeardGroup]],
        traffic: TrafficRecord | None = None,
    ) -> None:
        """`on_their_way`: models whose activation was ordered, with the group; its reports may not show them yet.
        `traffic`: of earlier hours, and where it is recorded; None: nowhere."""
        self._config = config
        self._rules = config.lifecycle
        self._cluster = cluster
        self._now = now
        self._on_their_way = on_their_way
        self.by_size: dict[int, GroupIndex] = {}
        """Number of devices of a group -> index of the groups of that size."""
        self._place_of: dict[str, tuple[int, str]] = {}
        """Address of a group's client -> (size of the index that the group is in, the group's name there)."""
        self._stood: dict[str, HeardGroup] = {}
        """Address of a group's client -> the group that is in the index."""
        self.changes = 0
        """Rises when the answer to a model that waits for room may have changed."""
        self._footings: dict[str, Hashable] = {}
        self._until: dict[str, float] = {}
        """Address of a group's client -> second until which its eligibility stays the same by itself."""
        self._soonest = inf
        """The earliest second in `_until`, or one before it."""
        self._expected: dict[str, tuple[HeardGroup, loader_pb2.Entry | None, Measured]] = {}
        """Models that were on their way at the last look -> (group, catalogue entry, measured bytes): what is booked
        for them there."""
        self._news: dict[str, HeardGroup] = {}
        """Groups that were made anew since the last call of `news`, by the addresses of their clients."""
        self._demands: dict[str, float] = {}
        self._windows: dict[str, RateWindow] = {}
        self._seen: dict[str, dict[str, tuple[int, int, int, int]]] = {}
        """Address of a group's client -> model -> its counters as last reported: requests, prompt tokens, output
        tokens, returns. A group's process counts on when a model that has left comes back, so counters of such a model
        are kept."""
        self._tpot_ms: dict[str, float] = {}
        self._traffic = traffic or TrafficRecord()
        self._expectations = Expectations(self._traffic.expected if config.remembers else None, now())
        self._foreseen: dict[int, tuple[tuple[tuple[Group, ...], list[str]], dict[str, str]]] = {}
        """Number of devices of a group -> the groups of that size and the models of which anything is expected, and
        model -> name of the group where it belongs."""
        self.outcomes = Outcomes()
        self._expectations.tell(self.outcomes)
        self._settled = self._traffic.settled if config.remembers else frozenset()
        self.expected = frozenset(self._expectations) | self._settled
        """Models whose places follow from traffic of before the start. A model that a group had when it was found is
        among them only if the placement before this one said so, which may have known nothing when it chose."""
        self._counted: dict[str, dict[str, tuple[int, int]]] = {}
        """Address of a group's client -> model -> its missed targets and returns, as last reported."""
        self.replication = Replication(config.replication)

    # --- groups

    @property
    def any(self) -> bool:
        """Whether any group is in an index."""
        return bool(self._place_of)

    def of(self, group: HeardGroup) -> GroupIndex | None:
        """The index that the group is in; None if it is in none."""
        there = self._place_of.get(group.client.address)
        return None if there is None else self.by_size[there[0]]

    def news(self) -> list[HeardGroup]:
        """Groups that were made anew since the last call."""
        news, self._news = self._news, {}
        return list(news.values())

    def rest_s(self) -> float:
        """Seconds in which nothing changes by itself; +inf if nothing ever does."""
        return max(0.0, self._soonest - self._now())

    def observe(self) -> None:
        """Takes in what was heard of the groups, and the demands that follow from it and from the time."""
        heard = self._heard()
        known = self._windows.keys() | (self._expectations if self._expectations.any(self._now()) else ())
        entries = ((name, self._cluster.entry(name)) for name in known)
        fresh = {name: self.demand(entry.model) for name, entry in entries if entry is not None}
        changed = [name for name, demand in fresh.items() if demand != self._demands.get(name)]
        self._demands = fresh
        for name in self._windows.keys() - fresh.keys():
            # Models come and go for ever; one that comes back begins anew.
            del self._windows[name]
        for name in self._tpot_ms.keys() - self._cluster.catalogue.keys():
            del self._tpot_ms[name]
        if self._cluster.catalogue_known:
            self.outcomes.keep(self._cluster.catalogue)
            self.replication.keep(self._cluster.catalogue)
            self.expected &= self._cluster.catalogue.keys()
        self._stand([*heard, *(group for name in changed for group, _ in self._cluster.residents(name))])

    def listen(self) -> None:
        """Takes in the groups that reported, or that have changed by themselves."""
        self._stand(self._heard())

    def _heard(self) -> list[HeardGroup]:
        """Groups that reported or have changed by themselves; the tokens of those that reported are counted."""
        now, before = self._now(), self._expected
        self._expected = {
            model: (group, self._cluster.entry(model), self._cluster.measured(model))
            for model, group in self._on_their_way().items()
        }
        differ = [model for model in before.keys() | self._expected if before.get(model) != self._expected.get(model)]
        others = [each[model][0] for model in differ for each in (before, self._expected) if model in each]
        fresh = self._cluster.fresh()
        for group in fresh:
            if group.reachable:
                self._count(group, now)
            self._hear_replicas(group, now)
        return list(dict.fromkeys([*fresh, *others, *self._ripe(now)]))

    def _ripe(self, now: float) -> list[HeardGroup]:
        if now < self._soonest:
            return []
        ripe = [address for address, until in self._until.items() if until <= now]
        self._soonest = min((until for until in self._until.values() if until > now), default=inf)
        return [group for address in ripe if (group := self._cluster.groups.get(address)) is not None]

    def _stand(self, groups: Iterable[HeardGroup]) -> None:
        """Brings groups up to date in their indexes. Groups that have left go first: another group may have their name
        by now."""
        places: dict[HeardGroup, tuple[int, str] | None] = {}
        for group in groups:
            address = group.client.address
            if self._cluster.groups.get(address, group) is not group:
                # Its group was forgotten, perhaps while an activation was on its way there; another group has its
                # address by now.
                if self._stood.get(address) is group:
                    self._lose(address)
                    self.changes += 1
                continue
            takes_models = group.reachable and group.capacity_bytes and not group.drained
            places[group] = (len(group.memory), group.name) if takes_models else None
            if self._place_of.get(address) != places[group]:
                self._lose(address)
        for group, place in places.items():
            self._hear(group, place)

    def _lose(self, address: str) -> None:
        self._stood.pop(address, None)
        if (before := self._place_of.pop(address, None)) is not None:
            self.by_size[before[0]].lose(before[1])

    def _hear(self, group: HeardGroup, place: tuple[int, str] | None) -> None:
        address = group.client.address
        self._until.pop(address, None)
        firm: Hashable = None
        if place is not None:
            self._place_of[address], self._stood[address] = place, group
            terms, here = _group(group, self._config.load_weight), self._residents(group)
            self.by_size.setdefault(place[0], GroupIndex(self._rules)).hear(terms, here)
            self._news[address] = group
            firm = eligibility_fingerprint(terms, here, self._rules)
            until = self._now() + holds_s(here, self._rules)
            if until < inf:
                self._until[address] = until
                self._soonest = min(self._soonest, until)
        if firm != self._footings.get(address):
            self._footings[address] = firm
            self.changes += 1
        if address not in self._cluster.groups:
            self._footings.pop(address, None)
            self._seen.pop(address, None)
            self._counted.pop(address, None)

    # --- demand

    def _count(self, group: HeardGroup, now: float) -> None:
        """Adds a group's token counters to the windows."""
        before_of, first = self._before(self._seen, group)
        if first:
            self.expected -= group.residents.keys() - self._settled
        for name, resident in group.residents.items():
            counters = (resident.arrived, resident.prefill_tokens, resident.decode_tokens, resident.returns)
            # What a group had counted before it was found is of any age.
            before = counters if first else before_of.get(name, _NOTHING)
            before_of[name] = counters
            total, total_before = sum(counters[1:3]), sum(before[1:3])
            if total != total_before:
                self._window(name).counted(total, total_before, now)
            if counters != before:
                self._traffic.observe(name, TrafficCounts(*map(_since, counters, before)))
            if resident.tpot_target_ms:
                self._tpot_ms[name] = resident.tpot_target_ms
        self._count_outcomes(group, now)

    def _count_outcomes(self, group: HeardGroup, now: float) -> None:
        """Takes in what became of the requests of a group's models since its last report."""
        before_of, first = self._before(self._counted, group)
        for name, resident in group.residents.items():
            counters = (resident.ttft_missed + resident.tpot_missed, resident.returns)
            before = counters if first else before_of.get(name, (0, 0))  # as in `_count`
            before_of[name] = counters
            missed, returns = map(_since, counters, before)
            self.outcomes.observe(name, now, late=resident.late > 0, missed=missed, returns=returns, group=group.name)

    def _before(self, counted: dict[str, dict[str, _T]], group: HeardGroup) -> tuple[dict[str, _T], bool]:
        """(model -> its counters as the group last reported them, whether this is the group's first report). Counters
        of models that are not in the catalogue any more are dropped."""
        address = group.client.address
        first = address not in counted
        before_of = counted.setdefault(address, {})
        if self._cluster.catalogue_known and len(before_of) > len(group.residents):
            known = self._cluster.catalogue.keys() | group.residents.keys()
            for name in before_of.keys() - known:
                del before_of[name]
        return before_of, first

    def _hear_replicas(self, group: HeardGroup, now: float) -> None:
        """Takes in which models are active on a group, and how late they are there."""
        there = group.residents.values() if group.reachable else ()
        active = [resident for resident in there if resident.residency == common_pb2.ACTIVE]
        demands = {resident.model: self._demand_at(resident.model) for resident in active}
        total = sum(demands.values())
        replicas = {
            r.model: Replica(demands[r.model] / total, r.late, r.ttft_met, r.ttft_missed, r.waiting + r.running)
            for r in active
        }
        self.replication.heard(group.client.address, replicas, now)

    def _demand_at(self, model: str, idle: bool = False) -> float:
        """Demand of the model on each group where it is active: gateways divide its requests evenly. What is expected
        of one that is idle and was not asked for yet counts if it is expected within the minute: others need not make
        way for a model that may come in an hour."""
        if idle and not self.rate(model) and not will_return(self.outcomes, model, self._now()):
            return kvpr.LEAST_DEMAND
        return self._demands.get(model, kvpr.LEAST_DEMAND) / max(1, len(self.replication.groups(model)))

    def rate(self, model: str) -> float:
        """Tokens per second of the model on all its groups."""
        window = self._windows.get(model)
        return window.rate(self._now()) if window is not None else 0.0

    def _window(self, model: str) -> RateWindow:
        if model not in self._windows:
            self._windows[model] = self._config.window()
        return self._windows[model]

    def demand(self, spec: common_pb2.ModelSpec) -> float:
        """The model's demand w now, in bytes per second per second of TPOT."""
        target = self._tpot_ms.get(spec.name) or spec.default_slo.tpot_ms
        return kvpr.demand(
            self._expectations.rate(spec.name, self._window(spec.name).rate(self._now()), self._now()),
            messages.layout(spec).demand_bytes,
            target / 1e3 if target else None,
            self._config.default_tpot_ms / 1e3,
        )

    def foreseen(self, spec: common_pb2.ModelSpec) -> str | None:
        """Name of the group where the model belongs by what was expected at the start, beside the others that were to
        come; None if nothing is expected any more, or there is no room for it."""
        size = max(1, spec.devices)
        there = self.by_size.get(size)
        if there is None or not self._expectations.any(self._now()):
            return None
        groups = tuple(there.groups)
        entries = [entry for name in self._expectations if (entry := self._cluster.entry(name)) is not None]
        made_of = groups, [each.model.name for each in entries]
        known = self._foreseen.get(size)
        if known is None or known[0] != made_of:
            models = [
                self.model(each.model).wanted(self.demand(each.model))
                for each in entries
                if max(1, each.model.devices) == size and each.model.name not in self._config.places
            ]
            known = made_of, foreseen(groups, there.residents, models, self._config.moves.assign)
            self._foreseen[size] = known
        return known[1].get(spec.name)

    def rates(self) -> dict[str, float]:
        """Tokens per second of every model that has had any."""
        now = self._now()
        return {name: window.rate(now) for name, window in self._windows.items()}

    # --- the policy's terms

    def model(self, spec: common_pb2.ModelSpec, resident: gpu_scheduler_pb2.Resident | None = None) -> kvpr.Model:
        """The model with the demand of the last observation, and the bytes that engines measured. `resident`: its state
        on a group; if that is None, or nothing was measured there, the quota is that of an engine which has yet to
        build its graphs, as `Activation.quota` books it."""
        measured = self._cluster.measured(spec.name)
        weights = max(spec.weights_bytes, measured.weights)
        extent = self._cluster.weights_extent_bytes  # gpu_schedulers book weights in whole extents
        parts = max(1, spec.devices)
        weights = parts * extent * -(-kvpr.share(weights, parts) // extent)
        quota = spec.quota_bytes
        if resident is not None and resident.quota_bytes:
            quota = resident.quota_bytes
        elif spec.quota_is_default:
            quota = max(quota - measured.graphs, measured.quota)
        return kvpr.Model(
            name=spec.name,
            demand=self._demands.get(spec.name, kvpr.LEAST_DEMAND),
            weights=weights + measured.graphs,
            floor=spec.floor_bytes,
            quota=quota,
            kept=resident.kept_bytes if resident is not None else 0,
            parts=parts,
            pinned=spec.pinned,
        )

    def _residents(self, group: HeardGroup) -> list[PlacedModel]:
        """What holds memory on the group, in the policy's terms: its residents, and what balloond's ledger has booked
        beside them (an engine that is being cleaned up after its death)."""
        found = []
        place = _place(group)
        coming = {name for name, where in self._on_their_way().items() if where is group}
        since_s = max(0.0, self._now() - group.heard_at)
        for resident in group.residents.values():
            entry = self._cluster.entry(resident.model)
            if entry is None or resident.residency not in PRESENT:
                continue
            wake_s, cold_s = durations(resident.wake_s, resident.cold_s)
            parts = max(1, entry.model.devices)
            active = resident.residency == common_pb2.ACTIVE
            # The group may not have reported yet that the model wakes; until then another would be put in the same
            # place.
            asleep = resident.residency == common_pb2.HIBERNATING and resident.model not in coming
            idle = resident.idle_s > 0.0 and (active or asleep)
            found.append(
                PlacedModel(
                    self.model(entry.model, resident).wanted(self._demand_at(resident.model, idle)),
                    place,
                    elsewhere=len(self.replication.groups(resident.model)) > active,
                    hibernating=asleep,
                    idle_s=resident.idle_s + since_s if idle else 0.0,
                    returns_s=self._expectations.returns_s(resident.model, self._now()),
                    wake_s=wake_s,
                    cold_s=cold_s,
                    has_image=entry.has_image or entry.on_disk,
                    host_bytes=resident.private_bytes,
                    stay_s=(resident.active_s + since_s if resident.active_s else inf) if active else 0.0,
                    claims=resident.waiting - resident.late,
                    kv_used=kvpr.share(resident.kv_used_bytes, parts),
                    kv_lacking=kvpr.share(resident.kv_lacking_bytes, parts),
                    ttft_s=resident.ttft_target_ms / 1e3,
                )
            )
        present = {resident.model.name for resident in found}
        for name in sorted(coming - present):
            entry = self._cluster.entry(name)
            if entry is not None:
                found.append(PlacedModel(self.model(entry.model), place, stay_s=0.0))
                present.add(name)
        for device in group.memory:
            for booking in device.bookings:
                if booking.model not in present and booking.model != WARM_ENGINES:  # warm engines make way
                    left = kvpr.Model(
                        booking.model,
                        weights=booking.weights_bytes,
                        floor=booking.floor_bytes,
                        quota=booking.quota_bytes,
                    )
                    on_device = kvpr.Place(group.name, (_device(group, device),))
                    found.append(PlacedModel(left, on_device, stay_s=0.0, has_engine=False))
        return found


def _since(total: int, before: int) -> int:
    """What a counter counted since it stood at `before`; one that fell belongs to a model that came anew."""
    return total - before if total >= before else total


def _device(group: HeardGroup, device: balloond_pb2.DeviceState) -> str:
    """The device's name in the cluster; every node has a "cuda:0"."""
    return device.device if device.device == group.name else f"{group.name}/{device.device}"


def _group(group: HeardGroup, load_weight: float) -> kvpr.Group:
    devices = (
        kvpr.Device(_device(group, d), d.capacity_bytes, kvpr.load(load_weight, d.capacity_bytes)) for d in group.memory
    )
    return kvpr.Group(group.name, tuple(devices), group.state.engine_limit or inf)


def _place(group: HeardGroup) -> kvpr.Place:
    """The place of a model on the group: a part on each of its devices."""
    return kvpr.Place(group.name, tuple(_device(group, device) for device in group.memory))
