"""The gRPC API: the same serving without JSON."""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncIterator

import grpc

from gateway import traces
from gateway.access.access import Access, Caller
from gateway.errors import BadField
from gateway.metrics import Count
from gateway.openai.bodies import MOST_STOP_CHARACTERS, MOST_STOP_TOKENS, MOST_STOPS, MOST_TOP_LOGPROBS
from gateway.request import Prompt, Request
from gateway.serving import Serving
from gateway.tools import structured_outputs
from protos import common_pb2, gateway_pb2, gateway_pb2_grpc
from services.errors import PrismError
from services.telemetry import log
from services.telemetry.spans import Span

_LONGEST_ID = 128
_SERVICE = f"/{gateway_pb2.DESCRIPTOR.services_by_name['Inference'].full_name}/"
_FINISH = {"stop": common_pb2.STOP, "length": common_pb2.LENGTH}


class InferenceServicer(gateway_pb2_grpc.InferenceServicer):
    """The gRPC service Inference. The server turns domain errors that are raised here into statuses."""

    def __init__(self, serving: Serving, access: Access) -> None:
        self._serving = serving
        self._access = access

    async def Generate(
        self, message: gateway_pb2.GenerateRequest, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[gateway_pb2.GenerateResponse]:
        arrival_s = time.monotonic()
        span = traces.of_rpc(context.invocation_metadata() or (), arrival_s)
        count = Count(traces.RPC)
        try:
            caller = self._caller(context)
            count.model = self._serving.known(message.model, caller)
            request = self._serving.resolve(decode(message, arrival_s))
            traces.asked(span, request, "chat" if message.HasField("chat") else "text_completion", streams=True)
            async for part in self._generate(request, span, caller):
                yield part
            count.answered(200)
        except PrismError as error:
            span.fail(type(error).__name__, str(error))
            count.failed(error)
            raise
        except Exception:
            count.fault()
            raise
        finally:
            span.end()
            count.end()

    async def _generate(
        self, request: Request, span: Span, caller: Caller
    ) -> AsyncIterator[gateway_pb2.GenerateResponse]:
        with await self._serving.begin(request, span, caller) as served:
            choice = served.choices[0]
            while choice.finish_reason is None:
                text = await choice.next()
                tokens = choice.answer.latest
                if text or tokens:
                    yield gateway_pb2.GenerateResponse(text=text, token_ids=tokens)
            yield gateway_pb2.GenerateResponse(
                finish=_FINISH[choice.finish_reason],
                prompt_tokens=len(served.prompts[0]),
                completion_tokens=choice.answer.tokens,
                cached_tokens=choice.answer.cached_tokens,
            )

    async def ListModels(
        self, message: gateway_pb2.ListModelsRequest, context: grpc.aio.ServicerContext
    ) -> gateway_pb2.ListModelsResponse:
        caller = self._caller(context)
        count = Count(f"{_SERVICE.strip('/')}/ListModels")
        count.answered(200)
        count.end()
        listed = gateway_pb2.ListModelsResponse()
        for route in self._serving.routes.all():
            name = route.model.name
            aliases = [alias for alias in self._serving.routes.aliases(name) if caller.may_use(name, alias)]
            if caller.may_use(name) or aliases:
                listed.models.add(
                    name=name,
                    residency=route.residency,
                    error=route.error or self._serving.fault(route),
                    context_tokens=route.model.context_tokens,
                    weights_bytes=route.measured_weights_bytes or route.model.weights_bytes,
                    aliases=aliases,
                )
        return listed

    def _caller(self, context: grpc.aio.ServicerContext) -> Caller:
        """The caller of the gRPC call, whose log lines name its key. Raises NoKey."""
        caller = self._access.of_call(_SERVICE, context.invocation_metadata() or ())
        log.bind(**caller.log_fields)
        return caller


def decode(message: gateway_pb2.GenerateRequest, arrival_s: float) -> Request:
    """The request in a message. Raises BadField that names what is wrong."""
    kind = message.WhichOneof("prompt")
    if kind is None:
        raise BadField("One of 'text', 'tokens' and 'chat' must be given.", "prompt", "missing_required_parameter")
    _check(message)
    sampling = _sampling(message.sampling)
    if kind == "chat":
        prompt = Prompt(messages=[{"role": one.role, "content": one.content} for one in message.chat.messages])
    else:
        prompt = Prompt(text=message.text) if kind == "text" else Prompt(tokens=list(message.tokens.ids))
    return Request(
        request_id=message.request_id[:_LONGEST_ID] or uuid.uuid4().hex,
        model=message.model,
        arrival_s=arrival_s,
        prompts=[prompt],
        sampling=sampling,
        limit_given=message.sampling.max_new_tokens > 0,
        slo=message.slo,
        prompt_field={"text": "text", "tokens": "tokens.ids", "chat": "chat.messages"}[kind],
        limit_field="sampling.max_new_tokens",
        stops=tuple(message.stop),
        grammar_field=f"sampling.{message.sampling.WhichOneof('grammar')}",
    )


def _sampling(asked: common_pb2.Sampling) -> common_pb2.Sampling:
    """The sampling with a JSON schema replaced by a grammar. Raises BadField."""
    kind = asked.WhichOneof("grammar")
    if kind is None:
        return asked
    text = getattr(asked, kind)
    if kind != "json_schema":
        structured_outputs.check_length(text, f"sampling.{kind}")
        return asked
    made = common_pb2.Sampling()
    made.CopyFrom(asked)
    made.ebnf = structured_outputs.of_schema(text, "sampling.json_schema")
    return made


def _check(message: gateway_pb2.GenerateRequest) -> None:
    sampling, slo = message.sampling, message.slo
    bounds = {
        "sampling.max_new_tokens": (sampling.max_new_tokens, 0, 1 << 62),
        "sampling.temperature": (sampling.temperature, 0, 2),
        "sampling.top_p": (sampling.top_p, 0, 1),
        "sampling.top_k": (sampling.top_k, 0, 1 << 31),
        "sampling.min_p": (sampling.min_p, 0, 1),
        "sampling.frequency_penalty": (sampling.frequency_penalty, -2, 2),
        "sampling.presence_penalty": (sampling.presence_penalty, -2, 2),
        "sampling.repetition_penalty": (sampling.repetition_penalty, 0, 2),
        "sampling.min_new_tokens": (sampling.min_new_tokens, 0, 1 << 62),
        "sampling.top_logprobs": (sampling.top_logprobs, 0, MOST_TOP_LOGPROBS),
        "slo.ttft_ms": (slo.ttft_ms, 0, 10**9),
        "slo.tpot_ms": (slo.tpot_ms, 0, 10**9),
    }
    for field, (value, least, most) in bounds.items():
        if not least <= value <= most:
            raise BadField(f"'{field}' is {value:g}: it must be from {least} to {most}.", field)
    if sampling.HasField("prompt_logprobs_from"):
        field = "sampling.prompt_logprobs_from"
        raise BadField(f"'{field}': no log-probabilities are returned here.", field, "unsupported_parameter")
    if sampling.label_token_ids:
        field = "sampling.label_token_ids"
        raise BadField(f"'{field}': no log-probabilities are returned here.", field, "unsupported_parameter")
    if message.HasField("chat") and not message.chat.messages:
        raise BadField("'chat.messages' is empty.", "chat.messages", "array_too_short")
    if len(message.stop) > MOST_STOPS or not all(message.stop):
        raise BadField(f"At most {MOST_STOPS} stop strings, none of them empty.", "stop")
    if any(len(stop) > MOST_STOP_CHARACTERS for stop in message.stop):
        raise BadField(f"A stop string has at most {MOST_STOP_CHARACTERS} characters.", "stop", "string_too_long")
    if len(sampling.stop_token_ids) > MOST_STOP_TOKENS:
        raise BadField(f"At most {MOST_STOP_TOKENS} stop tokens.", "sampling.stop_token_ids", "array_too_long")
    if any(token < 0 for token in message.tokens.ids):
        raise BadField("Token ids cannot be negative.", "tokens.ids")
