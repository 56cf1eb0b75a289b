import grpc
import pytest

from services import errors
from services.rpc.status import from_rpc, to_status

KINDS = [
    errors.Invalid,
    errors.NotFound,
    errors.Exists,
    errors.Refused,
    errors.Unmet,
    errors.Conflict,
    errors.Unavailable,
    errors.TimedOut,
]


@pytest.mark.parametrize("kind", KINDS)
def test_status_of_an_error_is_read_back_as_the_raised_error(kind):
    code, text = to_status(kind("three of four"))
    back = from_rpc(grpc.aio.AioRpcError(code, None, None, details=text))
    assert type(back) is kind and str(back) == "three of four"


def test_status_of_a_subclass_is_that_of_its_kind_of_error():
    class NoSuchModel(errors.NotFound):
        pass

    assert to_status(NoSuchModel("x"))[0] is grpc.StatusCode.NOT_FOUND


def test_a_status_without_a_kind_means_unavailable():
    assert type(from_rpc(grpc.aio.AioRpcError(grpc.StatusCode.INTERNAL, None, None))) is errors.Unavailable


def test_status_of_a_time_out_names_the_server_if_the_caller_does():
    code = grpc.StatusCode.DEADLINE_EXCEEDED
    for details in ("Deadline Exceeded", "Stream removed (Deadline Exceeded)"):
        late = grpc.aio.AioRpcError(code, None, None, details=details)
        assert str(from_rpc(late, "balloond at unix:/b")) == "balloond at unix:/b did not answer in time"
        assert type(from_rpc(late, "balloond")) is errors.TimedOut and str(from_rpc(late)) == details
    said = grpc.aio.AioRpcError(code, None, None, details="m is not gone after 30 s")
    assert str(from_rpc(said, "placement")) == "m is not gone after 30 s"


async def test_status_of_a_service_that_is_away_names_no_path_if_the_caller_names_the_service(tmp_path):
    async with grpc.aio.insecure_channel(f"unix:{tmp_path}/none") as channel:
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await channel.unary_unary("/a.B/C")(b"")
    assert str(from_rpc(refused.value, "placement")) == "placement is away"
    assert str(tmp_path) in str(from_rpc(refused.value))


def test_status_of_an_error_of_no_kind_is_unavailable():
    class Odd(errors.PrismError):
        pass

    assert to_status(Odd("x"))[0] is grpc.StatusCode.UNAVAILABLE
