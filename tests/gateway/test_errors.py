"""Errors as OpenAI's clients and gRPC's see them."""

from __future__ import annotations

import grpc
import pytest

from gateway import errors
from gateway.errors import BadField, Late, ModelFaulty, NotUp, TooMany, UnknownModel
from services.errors import Invalid, NotFound, PrismError, Refused, TimedOut, Unavailable
from services.rpc.status import to_status


@pytest.mark.parametrize(
    ("error", "status", "code", "grpc_code"),
    [
        (BadField("x", "n"), 400, "invalid_value", grpc.StatusCode.INVALID_ARGUMENT),
        (Invalid("x"), 400, "invalid_value", grpc.StatusCode.INVALID_ARGUMENT),
        (UnknownModel("m"), 404, "model_not_found", grpc.StatusCode.NOT_FOUND),
        (NotFound("x"), 404, "not_found", grpc.StatusCode.NOT_FOUND),
        (TooMany("x"), 429, "too_many_in_flight", grpc.StatusCode.RESOURCE_EXHAUSTED),
        (Refused("x"), 503, "no_room", grpc.StatusCode.RESOURCE_EXHAUSTED),
        (ModelFaulty("x"), 503, "model_error", grpc.StatusCode.UNAVAILABLE),
        (NotUp("x"), 503, "model_not_ready", grpc.StatusCode.UNAVAILABLE),
        (Late("x"), 503, "slo_ttft_missed", grpc.StatusCode.UNAVAILABLE),
        (Unavailable("x"), 503, "unavailable", grpc.StatusCode.UNAVAILABLE),
        (TimedOut("x"), 504, "time_out", grpc.StatusCode.DEADLINE_EXCEEDED),
        (PrismError("x"), 500, None, grpc.StatusCode.UNAVAILABLE),
    ],
)
def test_errors_of_each_kind_have_their_status_and_code(
    error: PrismError, status: int, code: str | None, grpc_code: grpc.StatusCode
) -> None:
    body = errors.body(error)["error"]
    assert (errors.shape(error).status, body["code"], body["message"]) == (status, code, str(error))
    assert set(body) == {"message", "type", "param", "code"}
    assert to_status(error)[0] == grpc_code


def test_error_body_has_the_invalid_field_as_its_param() -> None:
    assert errors.body(BadField("x", "messages[0].role"))["error"]["param"] == "messages[0].role"
    assert errors.body(UnknownModel("m"))["error"]["param"] == "model"


def test_error_shape_of_a_passing_error_has_retry_after() -> None:
    assert errors.shape(TooMany("x")).retry_after_s
    assert errors.shape(NotUp("x")).retry_after_s
    assert errors.shape(BadField("x", "n")).retry_after_s is None


@pytest.mark.parametrize(
    ("retry_s", "headers"), [(0.0, []), (0.2, [(b"retry-after", b"1")]), (30.0, [(b"retry-after", b"30")])]
)
def test_error_headers_of_a_faulty_model_have_retry_after_if_it_is_tried_again(
    retry_s: float, headers: list[tuple[bytes, bytes]]
) -> None:
    assert errors.headers(ModelFaulty("x", retry_s)) == headers
