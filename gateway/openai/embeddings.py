"""/v1/embeddings: each prompt of a request goes its own way to an engine, as prompts of completions do, and its vector
is put in its place when it comes."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Annotated, Any, Literal

import orjson
import pydantic
from pydantic import Field

from gateway.access.access import Caller
from gateway.errors import BadField
from gateway.openai import bodies
from gateway.openai.endpoint import Endpoint, Reply, gathered
from gateway.openai.vectors import as_base64, shortened
from gateway.request import Prompt, Request
from gateway.served import Choice
from protos import common_pb2
from services.errors import Unavailable

MOST_INPUTS = 2048
"""OpenAI's bound, on which its users' libraries rely."""
_UNSUPPORTED: Mapping[str, Any] = {
    # Fields of vLLM and others that would change the vectors, and the values with which they would not.
    "truncate_prompt_tokens": None,
    "add_special_tokens": True,
    "normalize": True,
    "messages": None,
}


class EmbeddingRequest(pydantic.BaseModel):
    """The body of /v1/embeddings."""

    model_config = pydantic.ConfigDict(extra="allow", strict=True, protected_namespaces=())

    model: str = Field(min_length=1)
    input: Annotated[list[Prompt], pydantic.PlainValidator(partial(bodies.prompts, most=MOST_INPUTS))]
    dimensions: int | None = Field(None, ge=1, lt=1 << 31)
    encoding_format: Literal["float", "base64"] | None = None

    @property
    def streams(self) -> bool:
        return False

    def request(self, request_id: str, slo: common_pb2.Slo, arrival_s: float) -> Request:
        """The gateway's request made of the body. Raises BadField."""
        for name, value in (self.model_extra or {}).items():
            if name in _UNSUPPORTED and value not in (None, _UNSUPPORTED[name]):
                raise BadField(f"'{name}' is not supported.", name, "unsupported_parameter")
        return Request(
            request_id=request_id,
            model=self.model,
            arrival_s=arrival_s,
            prompts=self.input,
            sampling=common_pb2.Sampling(),
            limit_given=False,
            slo=slo,
            prompt_field="input",
            numbered=len(self.input) > 1,
            embeds=True,
            few_at_once=True,
            dimensions=self.dimensions,
        )


class EmbeddingsEndpoint(Endpoint[EmbeddingRequest]):
    """The ASGI app of /v1/embeddings."""

    path = "/v1/embeddings"
    operation = "embeddings"

    def _parse(self, data: bytes) -> EmbeddingRequest:
        return bodies.parse(EmbeddingRequest, data)

    async def _answer(self, body: EmbeddingRequest, request: Request, reply: Reply, caller: Caller) -> None:
        with await self._serving.begin(request, reply.span, caller) as served:
            reply.add(await caller.headers())

            def written(choice: Choice) -> orjson.Fragment:
                if not choice.answer.embedding:  # the gpu_scheduler is older than embeddings
                    raise Unavailable("an engine made no embedding")
                vector = shortened(choice.answer.embedding, request.dimensions)
                # Encoded as it comes: encoding all vectors of a large request at once would hold up other requests'
                # streams.
                value = as_base64(vector) if body.encoding_format == "base64" else list(vector)
                return orjson.Fragment(orjson.dumps(value))

            vectors = await gathered(written, served.choices)
            data = [
                {"object": "embedding", "index": index, "embedding": vector} for index, vector in enumerate(vectors)
            ]
            tokens = sum(map(len, served.prompts))
            usage = {"prompt_tokens": tokens, "total_tokens": tokens}
            answer = {"object": "list", "data": data, "model": request.model, "usage": usage}
            await reply.whole(orjson.dumps(answer))
