"""Looking at all services of a system at once, again and again over the same connections. One that does not answer in
time is shown as that; the others are shown all the same."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from types import TracebackType
from typing import Any, TypeVar

from balloond.client import BalloondClient
from gpu_scheduler.client import GpuSchedulerClient
from loader.client import LoaderClient
from placement.client import PlacementClient
from prismctl import views
from prismctl.system import System
from services import rpc
from services.errors import PrismError

T = TypeVar("T")


class Looking:
    """An asynchronous context; `look` says how things are now, as plain values."""

    def __init__(self, system: System) -> None:
        self._system = system
        self._placement = PlacementClient(system.address("placement"))
        self._loader = LoaderClient(system.address("loader"))
        self._balloond = BalloondClient(system.address("balloond"))
        self._groups: dict[str, GpuSchedulerClient] = {}
        self._names: dict[str, str] = {}
        """Of groups, by address, as they last called themselves."""

    async def __aenter__(self) -> Looking:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        groups = (group.close() for group in self._groups.values())
        await asyncio.gather(self._placement.close(), self._loader.close(), self._balloond.close(), *groups)

    async def look(self) -> dict[str, Any]:
        """Takes as long as the slowest answer, at most twice `wait_s`: groups are asked when placement has said where
        they are."""
        cluster, routes, catalogue, ledger, gateway = await asyncio.gather(
            self._in_time(self._placement.cluster()),
            self._in_time(self._placement.routes()),
            self._in_time(self._loader.catalogue()),
            self._in_time(self._balloond.inspect()),
            rpc.healthy(self._system.address("gateway"), self._system.wait_s),
        )
        told = {group.address: group for group in cluster.groups} if cluster is not None else {}
        addresses = list(told) or list(self._groups) or self._system.group_sockets()
        states = await asyncio.gather(*(self._in_time(self._group(address).state()) for address in addresses))
        for address, state in zip(addresses, states, strict=True):
            if state is not None:
                self._names[address] = state.group
            elif address in told:
                self._names[address] = told[address].group
        devices = {device.device: device for device in ledger.devices} if ledger is not None else {}
        answers = (
            ("placement", cluster is not None and routes is not None),
            ("loader", catalogue is not None),
            ("balloond", ledger is not None),
            ("gateway", gateway),
        )
        groups = [
            views.group(self._names.get(address, address), address, told.get(address), state, devices)
            for address, state in zip(addresses, states, strict=True)
        ]
        return {
            "services": [
                {"service": service, "address": self._system.address(service), "answers": answered}
                for service, answered in answers
                if answered or service == "placement" or self._system.is_here(service)
            ]
            + [{"service": g["group"], "address": g["address"], "answers": g["answers"]} for g in groups],
            "groups": groups,
            "models": views.models(routes) if routes is not None else None,
            "images": None
            if catalogue is None
            else {"capacity_bytes": catalogue.host_capacity_bytes, "used_bytes": catalogue.host_used_bytes},
        }

    def _group(self, address: str) -> GpuSchedulerClient:
        if address not in self._groups:
            self._groups[address] = GpuSchedulerClient(address)
        return self._groups[address]

    async def _in_time(self, question: Awaitable[T]) -> T | None:
        try:
            async with asyncio.timeout(self._system.wait_s):
                return await question
        except (PrismError, TimeoutError):
            return None


def all_answer(seen: dict[str, Any]) -> bool:
    return all(service["answers"] for service in seen["services"])
