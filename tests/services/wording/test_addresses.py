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
def test_address_in_a_form_of_grpc_is_valid(address):
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
def test_address_of_another_form_is_refused_with_the_valid_forms(address):
    with pytest.raises(ValueError, match="is neither|is not the path"):
        addresses.grpc(address)


def test_socket_path_too_long_for_the_kernel_is_refused():
    assert addresses.socket_path("/" + "a" * 99)
    with pytest.raises(ValueError, match="has 101 bytes; a socket's path may have 100"):
        addresses.grpc("unix:/" + "a" * 100)
    with pytest.raises(ValueError, match="is not the path of a socket"):
        addresses.socket_path("unix:/run/a.sock")


def test_address_with_a_variable_is_checked_after_it_is_filled_in():
    assert addresses.http("127.0.0.1:800${INSTANCE}") and addresses.grpc("${NODE}") and addresses.socket_path("${AT}")
    with pytest.raises(ValueError, match='"nonsense" is not "HOST:PORT"'):
        addresses.http("nonsense")


def test_address_may_be_empty_only_if_it_is_optional():
    assert TypeAdapter(addresses.AddressOrNone).validate_python("") == ""
    with pytest.raises(ValidationError):
        TypeAdapter(addresses.Address).validate_python("")


def test_host_of_an_ipv6_address_has_no_brackets():
    assert addresses.host_and_port("[::1]:80") == ("::1", 80)
    assert addresses.host_and_port("localhost:8000") == ("localhost", 8000)
