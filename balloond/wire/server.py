"""The gRPC service: decode, await, encode."""

from __future__ import annotations

from typing import Any

from balloond.client import booked
from balloond.keeper.client import KeeperClient
from balloond.node.daemon import Daemon
from balloond.wire import messages
from protos import balloond_pb2, balloond_pb2_grpc
from services.rpc.watch import ThrottledFollower, follow_sparingly

NAME = "prism.balloond.v1.Balloond"
_STATE_EVERY_S, _STATE_SELDOM_S = 0.05, 1.0
_ANSWER_BEFORE_S = 0.05
"""Seconds before its call's deadline at which a room is answered."""
_LONGEST_ROOM_S = 60.0
_KEEPER_S = 0.5


class BalloondServicer(balloond_pb2_grpc.BalloondServicer):
    def __init__(self, node: str, daemon: Daemon, keeper: KeeperClient) -> None:
        self._node = node
        self._daemon = daemon
        self._keeper = keeper

    def _state(self) -> balloond_pb2.NodeState:
        daemon = self._daemon
        return messages.node(self._node, daemon.changed.revision + 1, daemon.devices.values(), daemon.process_of)

    async def SetBooking(
        self, request: balloond_pb2.SetBookingRequest, context: Any
    ) -> balloond_pb2.SetBookingResponse:
        self._daemon.set_booking(request.device, request.model, messages.booking(request))
        return balloond_pb2.SetBookingResponse()

    async def DropBooking(
        self, request: balloond_pb2.DropBookingRequest, context: Any
    ) -> balloond_pb2.DropBookingResponse:
        self._daemon.drop_booking(request.device, request.model)
        return balloond_pb2.DropBookingResponse()

    async def SetLimit(self, request: balloond_pb2.SetLimitRequest, context: Any) -> balloond_pb2.SetLimitResponse:
        outcome = self._daemon.set_limit(
            request.device, request.model, request.bytes, request.revision, request.deadline_ms
        )
        held = self._daemon.device(request.device).ledger.kv_of(request.model)
        return messages.outcome(outcome, held)

    async def MakeRoom(self, request: balloond_pb2.MakeRoomRequest, context: Any) -> balloond_pb2.MakeRoomResponse:
        left_s = context.time_remaining()
        within_s = _LONGEST_ROOM_S if left_s is None else max(0.0, left_s - _ANSWER_BEFORE_S)
        answer = await self._daemon.make_room(
            request.device, request.model, request.bytes, request.may_retract, request.hold_ms / 1e3, within_s
        )
        return messages.room(answer)

    async def SetDemand(self, request: balloond_pb2.SetDemandRequest, context: Any) -> balloond_pb2.SetDemandResponse:
        self._daemon.set_demand(request.device, request.weights)
        return balloond_pb2.SetDemandResponse()

    async def Watch(self, request: balloond_pb2.WatchRequest, context: Any) -> Any:
        pages_s = min(_STATE_SELDOM_S, request.pages_ms / 1e3)
        sparing = ThrottledFollower[balloond_pb2.NodeState](lambda state: booked(state.devices), pages_s)
        async for state in follow_sparingly(self._daemon.changed, self._state, sparing, _STATE_EVERY_S, None):
            yield state

    async def Inspect(self, request: balloond_pb2.InspectRequest, context: Any) -> balloond_pb2.NodeState:
        keeper = await self._keeper_state(context) if request.with_keeper else None
        state = self._state()
        if keeper is not None:
            state.keeper.CopyFrom(keeper)
        return state

    async def _keeper_state(self, context: Any) -> balloond_pb2.KeeperState:
        left_s = context.time_remaining()
        within_s = _KEEPER_S if left_s is None else min(_KEEPER_S, left_s / 2)
        return balloond_pb2.KeeperState(socket=self._keeper.path, answers=await self._keeper.answers(within_s))

    async def Events(self, request: balloond_pb2.EventsRequest, context: Any) -> balloond_pb2.EventsResponse:
        return messages.events(self._daemon.history.last(request.limit), self._daemon.now())
