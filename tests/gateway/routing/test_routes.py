"""The table of routes follows placement and outlives it."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from gateway.errors import UnknownModel
from gateway.routing.routes import Route, RouteTable, decode
from protos import common_pb2, placement_pb2
from services.errors import Unavailable


def route(name: str, *addresses: str, residency: common_pb2.Residency = common_pb2.ACTIVE) -> placement_pb2.Route:
    places = [placement_pb2.Place(group=a, address=a, residency=residency) for a in addresses]
    return placement_pb2.Route(model=common_pb2.ModelSpec(name=name), residency=residency, places=places, error="why")


def test_route_table_before_the_first_message_of_placement_is_unavailable() -> None:
    table = RouteTable()
    with pytest.raises(Unavailable):
        table.get("a")
    table.set([])
    with pytest.raises(UnknownModel):
        table.get("a")


def test_route_table_is_replaced_as_a_whole_and_listeners_are_called() -> None:
    table, heard = RouteTable(), []
    table.on_change(lambda routes: heard.append(sorted(routes)))
    table.set(map(decode, [route("b", "x"), route("a")]))
    assert [found.model.name for found in table.all()] == ["a", "b"]
    table.set([decode(route("c"))])
    assert heard == [["a", "b"], ["c"]]
    with pytest.raises(UnknownModel):
        table.get("a")


def test_alias_leads_to_its_model_and_never_hides_a_name() -> None:
    table, a, b, c = RouteTable(), route("a"), route("b"), route("c")
    a.model.aliases.extend(["x", "b"])
    c.model.aliases.extend(["x", "y"])
    table.set(map(decode, [c, b, a]))  # as two nodes' catalogues may have them
    assert [table.name(asked) for asked in ("x", "y", "a", "b", "z")] == ["a", "c", "a", "b", "z"]
    assert (table.aliases("a"), table.aliases("c"), table.aliases("none")) == (["x"], ["y"], [])
    table.set(map(decode, [b, c]))
    assert (table.name("x"), table.name("b")) == ("c", "b")


def test_route_in_error_is_faulty_only_without_places() -> None:
    assert decode(route("a", residency=common_pb2.ERROR)).faulty
    broken: Route = decode(route("a", "x", residency=common_pb2.ERROR))
    assert not broken.faulty
    assert not decode(route("a")).faulty


def test_fault_of_a_route_has_its_reason_and_time_to_retry_but_no_folder() -> None:
    told = route("a", residency=common_pb2.ERROR)
    told.error, told.retry_s = "/srv/models/a/config.json: Input/output error", 4.0
    fault = decode(told).fault
    assert str(fault) == "model 'a' is in state error: config.json: Input/output error" and fault.retry_s == 4.0


def test_route_table_gives_the_residency_by_model_and_address() -> None:
    table = RouteTable()
    table.set([decode(route("a", "x", residency=common_pb2.WAKING))])
    assert table.residency("a", "x") == common_pb2.WAKING
    assert table.residency("a", "y") == table.residency("b", "x") == common_pb2.RESIDENCY_UNSPECIFIED


async def test_route_table_stays_while_placement_is_away() -> None:
    table = RouteTable()

    async def messages() -> AsyncIterator[placement_pb2.Routes | None]:
        yield placement_pb2.Routes(routes=[route("a", "x")])
        assert table.fresh
        yield None
        assert (table.known, table.fresh) == (True, False)
        assert table.get("a").places[0].address == "x"
        yield placement_pb2.Routes(routes=[route("a", "y")])

    await table.follow(messages())
    assert table.fresh
    assert table.get("a").places[0].address == "y"
