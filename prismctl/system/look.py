"""Looks at all services of a system at once, again and again over the same connections. A service that does not answer
in time is shown as such, and the others are shown all the same."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable
from types import TracebackType
from typing import Any, TypeVar

from balloond.client import BalloondClient
from gpu_scheduler.client import GpuSchedulerClient
from loader.client import LoaderClient
from placement.client import PlacementClient
from prismctl.system import presence
from prismctl.system.system import SERVICES, SystemAddresses
from prismctl.views import values
from protos import balloond_pb2
from services.errors import PrismError, TimedOut, Unavailable

T = TypeVar("T")


class SystemSnapshots:
    """An asynchronous context; `look` returns the present state of the system as plain values."""

    def __init__(self, system: SystemAddresses) -> None:
        self._system = system
        self._placement = PlacementClient(system.address("placement"))
        self._loader = LoaderClient(system.address("loader"))
        self._balloond = BalloondClient(system.address("balloond"))
        self._groups: dict[str, GpuSchedulerClient] = {}
        self._problems: dict[str, str] = {}
        """Service, or address of a group -> why it does not answer."""
        self._names: dict[str, str] = {}
        """Address -> name of the group, as it last reported it."""

    async def __aenter__(self) -> SystemSnapshots:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        groups = (group.close() for group in self._groups.values())
        await asyncio.gather(self._placement.close(), self._loader.close(), self._balloond.close(), *groups)

    async def look(self) -> dict[str, Any]:
        """The state of the system as plain values. Takes as long as the slowest answer, at most twice `wait_s`: groups
        are asked once placement has reported where they are."""
        self._problems = {}
        cluster, routes, catalogue, ledger, self._problems["gateway"] = await asyncio.gather(
            self._in_time("placement", self._placement.cluster()),
            self._in_time("placement", self._placement.routes()),
            self._in_time("loader", self._loader.catalogue()),
            self._in_time("balloond", self._balloond.inspect(with_keeper=True, timeout_s=self._system.wait_s)),
            presence.problem(self._system.address("gateway"), self._system.wait_s),
        )
        told = {group.address: group for group in cluster.groups} if cluster is not None else {}
        addresses = list(told) or list(self._groups) or self._system.group_sockets()
        asking = (self._in_time(address, self._group(address).state()) for address in addresses)
        states, keeper = await asyncio.gather(asyncio.gather(*asking), self._keeper(ledger))
        for address, state in zip(addresses, states, strict=True):
            if state is not None:
                self._names[address] = state.group
            elif address in told:
                self._names[address] = told[address].group
        devices = {device.device: device for device in ledger.devices} if ledger is not None else {}
        groups = [
            values.group(self._names.get(address, address), address, told.get(address), state, devices)
            for address, state in zip(addresses, states, strict=True)
        ]
        services = [
            self._told(service, self._system.address(service), self._problems.get(service, ""))
            for service in SERVICES
            if not self._problems.get(service) or service == "placement" or self._system.is_here(service)
        ]
        services += keeper
        services += [self._told(g["group"], g["address"], self._problems.get(g["address"], "")) for g in groups]
        return {
            "hint": None if any(service["answers"] for service in services) else self._system.nowhere(),
            "services": services,
            "groups": groups,
            "models": values.models(routes) if routes is not None else None,
            "images": None
            if catalogue is None
            else {"capacity_bytes": catalogue.host_capacity_bytes, "used_bytes": catalogue.host_used_bytes},
        }

    def _told(self, service: str, address: str, problem: str) -> dict[str, Any]:
        return {"service": service, "address": address, "answers": not problem, "problem": problem or None}

    async def _keeper(self, ledger: balloond_pb2.NodeState | None) -> list[dict[str, Any]]:
        """The keeper's state as balloond sees it, which may be on another host; if balloond does not answer, what the
        keeper's socket shows, if that is here."""
        if ledger is not None and ledger.HasField("keeper"):
            path, unheard = ledger.keeper.socket, "balloond hears nothing of it"
            if ledger.keeper.answers:
                problem = ""
            else:
                problem = f"{unheard}; {await presence.why(path)}" if os.path.exists(path) else unheard
        elif self._system.is_here("keeper"):
            path = self._system.keeper_socket
            problem = await presence.keeper_problem(path, self._system.wait_s)
        else:
            return []
        return [self._told("keeper", path, problem)]

    def _group(self, address: str) -> GpuSchedulerClient:
        if address not in self._groups:
            self._groups[address] = GpuSchedulerClient(address)
        return self._groups[address]

    async def _in_time(self, service: str, question: Awaitable[T]) -> T | None:
        """The answer; None if there was none in time, and then `_problems` has the reason as far as it is known."""
        address = self._system.address(service) if service in SERVICES else service
        try:
            async with asyncio.timeout(self._system.wait_s):
                return await question
        except TimeoutError:
            self._problems[service] = await presence.why(address)
        except (Unavailable, TimedOut) as error:
            self._problems[service] = await presence.why(address, connected=str(error))
        except PrismError as error:
            self._problems[service] = str(error)
        return None


def all_answer(seen: dict[str, Any]) -> bool:
    return all(service["answers"] for service in seen["services"])
