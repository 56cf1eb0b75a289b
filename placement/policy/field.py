"""All devices of a cluster as arrays: the resulting pressure of one model on every device at once.

Algorithm 1 asks 10,000 times for the least of 10,000 resulting pressures (W + w) / (S - weights) + load (W + w). That
value depends on the model in the numerator and in the denominator, so no order of the devices holds for the next model:
a heap by pressure answers another question, and an exact search tree of such fractions has to be rebuilt where a model
was booked. The whole row is eight passes over arrays that stay in the cache (some 40 microseconds for 10,000 devices),
exact, and indifferent to how the load is spread. The numbers are those of `kvpr.Books`, added in the same order, so the
floats are equal.

Groups of the same size make one block, a matrix with a row for each group. Ties go to the smaller group size, then to
the group that serves the least demand today (nothing is pushed away for no gain), then to the order given.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from heapq import merge
from itertools import islice
from math import inf
from typing import cast

import numpy as np
from numpy.typing import NDArray

from placement.policy.kvpr import Group, Model, Place

Floats = NDArray[np.float64]
Mask = NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Option:
    """A place and the highest resulting pressure on its devices."""

    place: Place
    pressure: float


def pressures_of(demand: Floats, left: Floats, load: Floats) -> Floats:
    """`kvpr.pressure` of many devices; each has to have something left."""
    found: Floats = demand / left + demand * load
    return found


class _Block:
    """Groups with `size` devices each; their devices are those of the field from number `first` on."""

    def __init__(self, groups: Sequence[Group], size: int, first: int) -> None:
        self.groups = groups
        self.size = size
        self.first = first
        count = size * len(groups)
        self._names = [tuple(device.name for device in group.devices) for group in groups]
        self._whole = [Place(group.name, names) for group, names in zip(groups, self._names, strict=True)]
        """For each group, the place of a model with a part on every device."""
        self.result: Floats = np.empty(count)
        self._left_after: Floats = np.empty(count)
        self._by_load: Floats = np.empty(count)
        self._unfit: Mask = np.empty(count, dtype=np.bool_)
        self._full: Mask = np.empty(count, dtype=np.bool_)

    def over(self, field: Field) -> _Block:
        """A block of the same groups, over the arrays of that field."""
        other = _Block.__new__(_Block)
        other.__dict__ = dict(self.__dict__)
        mine = slice(self.first, self.first + len(self.result))
        other.demand, other.left, other.free = field.demand[mine], field.left[mine], field.free[mine]
        load = field.load[mine]
        other.load = load if load.any() else None
        return other

    demand: Floats
    left: Floats
    free: Floats
    load: Floats | None
    """Load of each device in 1/bytes; None if no device has one."""

    def rows(self, of_devices: Floats) -> Floats:
        """The block's part of the field's array: a row for each group."""
        return of_devices[self.first : self.first + len(self.result)].reshape(-1, self.size)

    def evaluate(self, model: Model) -> Floats:
        """Fills and returns `result`: the resulting pressure on every device, +inf where the model does not fit."""
        unfit = self._find_unfit(model)
        np.maximum(self._left_after, 1.0, out=self._left_after)  # less than 1 is no whole byte: the model is unfit
        np.add(self.demand, model.part_demand, out=self.result)
        if self.load is not None:
            np.multiply(self.result, self.load, out=self._by_load)
        np.divide(self.result, self._left_after, out=self.result)
        if self.load is not None:
            np.add(self.result, self._by_load, out=self.result)
        np.putmask(self.result, unfit, inf)
        return self.result

    def worst_of_the_best(self, parts: int) -> Floats:
        """For each group, the highest of its `parts` least values in `result`."""
        rows = self.result.reshape(-1, self.size)
        if parts == self.size:  # numpy is slow along short rows: five times as fast column by column
            return reduce(np.maximum, [rows[:, column] for column in range(self.size)])
        return np.partition(rows, parts - 1, axis=1)[:, parts - 1]

    def fitting(self, model: Model) -> Mask:
        return np.logical_not(self._find_unfit(model))

    def _find_unfit(self, model: Model) -> Mask:
        fixed, needed = model.fixed, model.needed
        np.subtract(self.left, float(fixed), out=self._left_after)
        np.less(self.free, float(needed), out=self._unfit)
        if needed == fixed:  # elsewhere the floor fits, so something is left for KV anyway
            np.less_equal(self._left_after, 0.0, out=self._full)
            np.logical_or(self._unfit, self._full, out=self._unfit)
        return self._unfit

    def best_first(self, model: Model) -> Iterator[Option]:
        """The block's places where the model fits, best first (`Field.best_first`)."""
        size, parts = self.size, model.parts
        result = self.evaluate(model)
        if parts == 1:
            for i, worst in _ascending(result):
                yield Option(self.place(i // size, [i % size]), worst)
            return
        for row, worst in _ascending(self.worst_of_the_best(parts)):
            values = result[row * size : (row + 1) * size].tolist()
            yield Option(self.place(row, sorted(sorted(range(size), key=values.__getitem__)[:parts])), worst)

    def place(self, row: int, columns: Sequence[int]) -> Place:
        """The place made of the devices with these column numbers of a group."""
        if len(columns) == self.size:
            return self._whole[row]
        names = self._names[row]
        return Place(self.groups[row].name, tuple([names[i] for i in columns]))


def _cells(values: Floats) -> memoryview[float]:
    return cast("memoryview[float]", values.data)


def _ascending(values: Floats) -> Iterator[tuple[int, float]]:
    """Indices and values of all finite values, in ascending order of value, the first of equals first. Overwrites
    `values`."""
    while True:
        i = int(values.argmin())
        value = float(values[i])
        if value == inf:
            return
        yield i, value
        values[i] = inf


class Field:
    """All devices of the cluster; `book` changes the field, `copy` makes an independent one."""

    def __init__(self, groups: Sequence[Group], present: Mapping[str, float]) -> None:
        """`present`: group -> demand that it serves today, for ties. Raises ValueError if a device is in two groups."""
        ordered = sorted(groups, key=lambda group: present.get(group.name, 0.0))
        blocks: list[_Block] = []
        self._where: dict[str, int] = {}
        self._group_of: dict[str, str] = {}
        capacity: list[float] = []
        load: list[float] = []
        for size in sorted({len(group.devices) for group in groups} - {0}):
            block = _Block([group for group in ordered if len(group.devices) == size], size, len(capacity))
            blocks.append(block)
            for group in block.groups:
                for device in group.devices:
                    if device.name in self._where:
                        raise ValueError(f"device {device.name} is in two groups")
                    self._where[device.name] = len(capacity)
                    self._group_of[device.name] = group.name
                    capacity.append(float(device.capacity))
                    load.append(device.load)
        self.demand: Floats = np.zeros(len(capacity))
        """Demand W booked on each device, by number."""
        self.left: Floats = np.array(capacity)
        """Bytes S of each device without weights and quotas."""
        self.free: Floats = np.array(capacity)
        """Bytes of each device without weights, quotas and floors."""
        self.capacity: Floats = np.array(capacity)
        self.load: Floats = np.array(load)
        self._blocks = [block.over(self) for block in blocks]
        self._one_by_one()

    def _one_by_one(self) -> None:
        """Makes views of the arrays for single devices, which are three times as fast as numpy's own look-ups."""
        self._demand, self._left, self._free = _cells(self.demand), _cells(self.left), _cells(self.free)
        self._load = _cells(self.load)

    def copy(self) -> Field:
        """An independent field in the same state."""
        other = Field.__new__(Field)
        other.demand, other.left, other.free = self.demand.copy(), self.left.copy(), self.free.copy()
        other._where, other._group_of = self._where, self._group_of
        other.capacity, other.load = self.capacity, self.load
        other._blocks = [block.over(other) for block in self._blocks]
        other._one_by_one()
        return other

    @property
    def groups(self) -> list[Group]:
        """Groups in the order of `by_group`."""
        return [group for block in self._blocks for group in block.groups]

    def by_group(self, model: Model) -> Floats:
        """For each group, the pressure of the best place for the model; +inf where it does not fit."""
        found = []
        for block in self._blocks:
            if block.size < model.parts:
                found.append(np.full(len(block.groups), inf))
            else:
                block.evaluate(model)
                found.append(block.worst_of_the_best(model.parts))
        return np.concatenate(found) if found else np.empty(0)

    def nth_most(self, of_devices: Floats, parts: int) -> Floats:
        """For each group, the value of the worst of its `parts` devices with the most; -inf if it has fewer devices."""
        found = []
        for block in self._blocks:
            rows = block.rows(of_devices)
            if block.size < parts:
                found.append(np.full(len(rows), -inf))
            else:
                found.append(np.partition(rows, block.size - parts, axis=1)[:, block.size - parts])
        return np.concatenate(found) if found else np.empty(0)

    def numbers(self, place: Place) -> tuple[int, ...]:
        """Numbers of the devices of a place."""
        return tuple(self._where[device] for device in place.devices)

    def pressures(self) -> Floats:
        """Pressure of every device as booked, by number; 0 without demand, +inf where demand has nothing left."""
        with np.errstate(divide="ignore", invalid="ignore"):
            found = pressures_of(self.demand, self.left, self.load)
        found[self.left <= 0] = inf
        found[self.demand <= 0] = 0.0
        return found

    def single(self, number: int) -> Place:
        """The place that is the device with this number alone."""
        block = next(each for each in self._blocks if number < each.first + len(each.result))
        row, column = divmod(number - block.first, block.size)
        return block.place(row, [column])

    def has(self, place: Place) -> bool:
        """Whether the place is still part of the cluster."""
        for device in place.devices:  # a plain loop: this is called for every model of every decision
            if self._group_of.get(device) != place.group:
                return False
        return True

    def book(self, model: Model, devices: Iterable[str]) -> None:
        """Books the parts of a model on devices, whether they fit or not."""
        demand, fixed, needed = model.part_demand, model.fixed, model.needed
        where, demands, left, free = self._where, self._demand, self._left, self._free
        for device in devices:
            i = where[device]
            demands[i] += demand
            left[i] -= fixed
            free[i] -= needed

    def rebook(self, device: str, models: Collection[Model]) -> None:
        """Sets which models have a part on the device, whatever was booked there before."""
        i = self._where[device]
        self.demand[i] = sum(model.part_demand for model in models)
        self.left[i] = self.capacity[i] - sum(model.fixed for model in models)
        self.free[i] = self.capacity[i] - sum(model.needed for model in models)

    def resulting(self, model: Model, place: Place) -> float:
        """The highest resulting pressure on the devices of a place; +inf where the model does not fit."""
        demand, fixed, needed = model.part_demand, model.fixed, model.needed
        worst = 0.0
        where, demands, lefts, free, loads = self._where, self._demand, self._left, self._free, self._load
        for device in place.devices:
            i = where[device]
            left = lefts[i] - fixed
            if free[i] < needed or left <= 0:
                return inf
            total = demands[i] + demand
            worst = max(worst, total / left + total * loads[i])
        return worst

    def best_first(self, model: Model) -> Iterator[Option]:
        """All places where the model fits, best first; a group of several devices may appear more than once for a model
        of one part. The iterator has to be used before the field is asked for another model, or changed."""
        found = [block.best_first(model) for block in self._blocks if block.size >= model.parts]
        return found[0] if len(found) == 1 else merge(*found, key=lambda option: option.pressure)

    def best(self, model: Model, count: int = 1) -> list[Option]:
        """The `count` best places where the model fits."""
        return list(islice(self.best_first(model), count))

    def first(self, model: Model) -> Place | None:
        """The first place where the model fits; None if it fits nowhere."""
        for block in self._blocks:
            if block.size < model.parts:
                continue
            fitting = block.fitting(model)
            if model.parts == 1:
                i = int(fitting.argmax())
                if fitting[i]:
                    return block.place(i // block.size, [i % block.size])
                continue
            by_group = fitting.reshape(-1, block.size).sum(axis=1) >= model.parts
            row = int(by_group.argmax())
            if by_group[row]:
                start = row * block.size
                columns = np.flatnonzero(fitting[start : start + block.size])[: model.parts]
                return block.place(row, columns.tolist())
        return None
