"""Addresses are checked when a configuration is read, so that what gRPC would make of them never comes to be."""

import pytest
from pydantic import TypeAdapter, ValidationError

from services.wording import addresses


@pytest.mark.parametrize(
    "address",
    [
        "unix:/run/prism/a.sock",
        "unix:a.sock",
        "127.0.0.1:0",
        "node-a:7010",
        "[::1]:65535",
        "dns:node:1",
        "dns:///node:1",
    ],
)
def test_grpcs_forms_are_taken(address):
    assert addresses.grpc(address) == address


@pytest.mark.parametrize(
    "address",
    [
        "",
        "127.0.0.1",
        "127.0.0.1:99999",
        "127.0.0.1:",
        ":7010",
        "::1:80",
        "/tmp/g.sock",
        "unix:",
        "http://a:80",
        "a:-1",
    ],
)
def test_what_grpc_would_understand_in_its_own_way_is_refused_with_the_forms_there_are(address):
    with pytest.raises(ValueError, match="is neither|is not the path"):
        addresses.grpc(address)


def test_a_path_that_the_kernel_would_cut_off_is_refused():
    assert addresses.socket_path("/" + "a" * 99)
    with pytest.raises(ValueError, match="has 101 bytes; a socket's path may have 100"):
        addresses.grpc("unix:/" + "a" * 100)
    with pytest.raises(ValueError, match="is not the path of a socket"):
        addresses.socket_path("unix:/run/a.sock")


def test_what_the_environment_will_fill_in_is_looked_at_then():
    assert addresses.http("127.0.0.1:800${INSTANCE}") and addresses.grpc("${NODE}") and addresses.socket_path("${AT}")
    with pytest.raises(ValueError, match='"nonsense" is not "HOST:PORT"'):
        addresses.http("nonsense")


def test_an_address_that_may_be_left_out_may_be_empty_and_no_other():
    assert TypeAdapter(addresses.AddressOrNone).validate_python("") == ""
    with pytest.raises(ValidationError):
        TypeAdapter(addresses.Address).validate_python("")


def test_the_host_of_ipv6_is_told_without_its_brackets():
    assert addresses.host_and_port("[::1]:80") == ("::1", 80)
    assert addresses.host_and_port("localhost:8000") == ("localhost", 8000)
