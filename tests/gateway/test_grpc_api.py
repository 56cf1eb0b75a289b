"""Generation over gRPC."""

from __future__ import annotations

import asyncio

import grpc
import pytest

from protos import common_pb2, gateway_pb2, gateway_pb2_grpc
from services.rpc import rpc
from testing.patience import PATIENCE_S
from tests.gateway import fakes
from tests.gateway.conftest import MODEL, World
from tests.gateway.fakes import Running

TEXT = "one two 世界 three"


def ask(**more: object) -> gateway_pb2.GenerateRequest:
    if not {"text", "tokens", "chat"} & set(more):
        more["text"] = "hello"
    return gateway_pb2.GenerateRequest(model=MODEL, **more)  # type: ignore[arg-type]


async def generate(world: World, request: gateway_pb2.GenerateRequest) -> list[gateway_pb2.GenerateResponse]:
    async with rpc.channel(world.grpc_address) as channel:
        return [message async for message in gateway_pb2_grpc.InferenceStub(channel).Generate(request)]


async def test_grpc_stream_has_text_and_tokens_and_its_counts_last(world: World) -> None:
    said = world.say(TEXT)
    *parts, last = await generate(world, ask())
    assert "".join(part.text for part in parts) == TEXT
    assert [token for part in parts for token in part.token_ids] == said
    submit = world.groups[0].requests[0].submit
    assert (last.finish, last.prompt_tokens, last.completion_tokens) == (
        common_pb2.STOP,
        len(submit.token_ids),
        len(said),
    )


async def test_grpc_prompt_is_text_tokens_or_chat(world: World) -> None:
    world.say("one")
    await generate(world, ask())
    await generate(world, ask(tokens=gateway_pb2.TokenIds(ids=[5, 6, 7])))
    messages = [gateway_pb2.Chat.Message(role="user", content="hello")]
    await generate(world, ask(chat=gateway_pb2.Chat(messages=messages)))
    text, tokens, chat = (list(request.submit.token_ids) for request in world.groups[0].requests)
    assert text == [0, *world.ids("hello")]
    assert tokens == [5, 6, 7]
    assert chat == world.ids("<s><|user|>hello\n<|assistant|>")


async def test_grpc_json_schema_reaches_the_engine_as_a_grammar(world: World) -> None:
    world.say("one")
    await generate(world, ask(sampling=common_pb2.Sampling(max_new_tokens=3, json_schema='{"const": "é"}')))
    sampling = world.groups[0].requests[-1].submit.sampling
    assert sampling.WhichOneof("grammar") == "ebnf" and '"\\"é\\""' in sampling.ebnf


async def test_grpc_sampling_targets_and_stop_strings_are_applied(world: World) -> None:
    world.say(TEXT)
    sampling = common_pb2.Sampling(max_new_tokens=30, temperature=0.5, seed=4)
    slo = common_pb2.Slo(ttft_ms=300)
    parts = await generate(world, ask(sampling=sampling, slo=slo, stop=["世"], request_id="mine"))
    assert "".join(part.text for part in parts) == "one two "
    submit = world.groups[0].requests[0].submit
    sampling.stop_token_ids.append(1)  # the tokenizer's own end
    assert (submit.sampling, submit.slo.ttft_ms, submit.has_target) == (sampling, 300, True)
    assert submit.request_id.startswith("mine/")


async def test_grpc_stream_whose_engine_dies_only_pauses(world: World) -> None:
    said = world.say(TEXT)

    async def breaks(running: Running) -> None:
        running.tokens(said[:2])
        running.finish(common_pb2.FAILED, "its engine died")

    world.groups[0].script = breaks
    await world.publish(world.route(*map(fakes.place, world.groups)))
    parts = await generate(world, ask(sampling=common_pb2.Sampling(max_new_tokens=100)))
    assert "".join(part.text for part in parts) == TEXT
    assert parts[-1].completion_tokens == len(said)


async def test_grpc_call_that_is_cancelled_frees_the_engine(world: World) -> None:
    async def endless(running: Running) -> None:
        running.tokens(world.ids("one"))
        await running.cancelled.wait()

    world.groups[0].script = endless
    async with rpc.channel(world.grpc_address) as channel:
        call = gateway_pb2_grpc.InferenceStub(channel).Generate(ask())
        await call.read()
        call.cancel()
        await asyncio.wait_for((await world.groups[0].arrived(1)).cancelled.wait(), PATIENCE_S)


@pytest.mark.parametrize(
    ("request_", "code", "words"),
    [
        (gateway_pb2.GenerateRequest(model="none", text="a"), grpc.StatusCode.NOT_FOUND, "none"),
        (gateway_pb2.GenerateRequest(model=MODEL), grpc.StatusCode.INVALID_ARGUMENT, "text"),
        (
            ask(sampling=common_pb2.Sampling(json_schema='{"items": {"contains": {}}, "type": "array"}')),
            grpc.StatusCode.INVALID_ARGUMENT,
            "'sampling.json_schema': 'contains' at '#/items' cannot be kept",
        ),
        (ask(sampling=common_pb2.Sampling(regex="a" * 65_537)), grpc.StatusCode.INVALID_ARGUMENT, "sampling.regex"),
        (ask(sampling=common_pb2.Sampling(temperature=3)), grpc.StatusCode.INVALID_ARGUMENT, "sampling.temperature"),
        (ask(sampling=common_pb2.Sampling(max_new_tokens=-1)), grpc.StatusCode.INVALID_ARGUMENT, "max_new_tokens"),
        (ask(sampling=common_pb2.Sampling(max_new_tokens=9999)), grpc.StatusCode.INVALID_ARGUMENT, "max_new_tokens"),
        (
            ask(sampling=common_pb2.Sampling(label_token_ids=[5])),
            grpc.StatusCode.INVALID_ARGUMENT,
            "sampling.label_token_ids",
        ),
        (ask(text="z" * 600), grpc.StatusCode.INVALID_ARGUMENT, "512"),
        (ask(stop=[""]), grpc.StatusCode.INVALID_ARGUMENT, "stop"),
        (ask(chat=gateway_pb2.Chat()), grpc.StatusCode.INVALID_ARGUMENT, "chat.messages"),
        (ask(tokens=gateway_pb2.TokenIds(ids=[-1])), grpc.StatusCode.INVALID_ARGUMENT, "Token ids"),
    ],
)
async def test_grpc_errors_have_their_status_and_name_the_fault(
    world: World, request_: gateway_pb2.GenerateRequest, code: grpc.StatusCode, words: str
) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await generate(world, request_)
    assert refused.value.code() == code
    assert words in (refused.value.details() or "")


async def test_grpc_request_of_a_model_in_error_is_unavailable_with_its_reason(world: World) -> None:
    await world.publish(world.route(residency=common_pb2.ERROR, error="tensor x is missing"))
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await generate(world, ask())
    assert refused.value.code() == grpc.StatusCode.UNAVAILABLE
    assert "tensor x is missing" in (refused.value.details() or "")
    async with rpc.channel(world.grpc_address) as channel:
        listed = await gateway_pb2_grpc.InferenceStub(channel).ListModels(gateway_pb2.ListModelsRequest())
    (model,) = listed.models
    assert (model.name, model.residency, model.error) == (MODEL, common_pb2.ERROR, "tensor x is missing")
