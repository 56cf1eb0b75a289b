"""/v1/score and /v1/rerank: how likely given tokens are after a prompt, of many prompts at once. Each goes its own way
to an engine, as those of embeddings do, and nothing is sampled."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Annotated, Any

import orjson
import pydantic
from pydantic import Field

from gateway.access.access import Caller
from gateway.errors import BadField
from gateway.openai import bodies
from gateway.openai.endpoint import Endpoint, Reply, gathered
from gateway.request import Prompt, QueryDocument, Request
from gateway.served import Choice, Served
from gateway.text import reranking
from protos import common_pb2
from services.errors import Unavailable

MOST_ITEMS = 2048
"""As many as inputs of embeddings."""
MOST_LABELS = 128
MOST_TOGETHER = 1 << 24
"""The most characters, or token ids, of all prompts of a request: each has the query again, and a body of some
megabytes could become many gigabytes."""
_UNSUPPORTED_OF_SCORES: Mapping[str, Sequence[Any]] = {
    # Fields of SGLang, vLLM and others that would change the scores, and the values with which they would not.
    "embed_override_token_id": (),
    "query_embed_overrides": (),
    "item_embed_overrides": (),
    "return_pooled_hidden_states": (False,),
    "text_1": (),
    "text_2": (),
    "truncate_prompt_tokens": (),
}
_UNSUPPORTED_OF_RANKS: Mapping[str, Sequence[Any]] = {
    "max_tokens_per_doc": (),
    "max_chunks_per_doc": (),
    "rank_fields": (),
    "truncate_prompt_tokens": (),
    "truncate": (False,),
    "raw_scores": (False,),
    "use_activation": (True,),
    "activation": (True,),
}


def _query(value: Any) -> str | list[int]:
    if isinstance(value, str):
        return value
    if not isinstance(value, list) or not value or not all(map(bodies.is_token, value)):
        raise ValueError("must be a string or a list of token ids")
    if len(value) > bodies.MOST_IDS:
        raise ValueError(f"at most {bodies.MOST_IDS} token ids, not {len(value)}")
    return value


def _documents(value: Any) -> list[str]:
    """The documents' texts. Raises ValueError."""
    if not isinstance(value, list) or not value:
        raise ValueError("must be a list of texts, or of objects with a 'text', and not empty")
    if len(value) > MOST_ITEMS:
        raise ValueError(f"at most {MOST_ITEMS} documents, not {len(value)}")
    texts = []
    for index, one in enumerate(value):
        text = one.get("text") if isinstance(one, dict) else one
        if not isinstance(text, str) or not text.strip():
            raise ValueError(f"[{index}] is no text, or an empty one")
        texts.append(text)
    return texts


def _check_together(each: int, others: Iterable[int]) -> None:
    """Raises BadField if prompts are too long together; each has `each` characters or ids beside the `others`."""
    together = sum(each + other for other in others)
    if together > MOST_TOGETHER:
        raise BadField(
            f"'query' again in each prompt makes {together} characters or token ids: {MOST_TOGETHER} at most.",
            "query",
            "string_too_long",
        )


class _Body(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(extra="allow", strict=True, protected_namespaces=())

    model: str = Field(min_length=1)

    @property
    def streams(self) -> bool:
        return False

    def _request(
        self, request_id: str, slo: common_pb2.Slo, arrival_s: float, prompts: Sequence[Prompt], field: str
    ) -> Request:
        return Request(
            request_id=request_id,
            model=self.model,
            arrival_s=arrival_s,
            prompts=prompts,
            sampling=common_pb2.Sampling(prompt_only=True),
            limit_given=False,
            slo=slo,
            prompt_field=field,
            numbered=True,
            few_at_once=True,
        )


class ScoreRequest(_Body):
    """The body of /v1/score, as SGLang takes it."""

    query: Annotated[str | list[int], pydantic.PlainValidator(_query)]
    items: Annotated[list[Prompt], pydantic.PlainValidator(partial(bodies.prompts, most=MOST_ITEMS))]
    label_token_ids: list[Annotated[int, Field(ge=0, lt=bodies.INT64)]] = Field(min_length=1, max_length=MOST_LABELS)
    apply_softmax: bool | None = None
    item_first: bool | None = None

    def request(self, request_id: str, slo: common_pb2.Slo, arrival_s: float) -> Request:
        """The gateway's request made of the body. Raises BadField."""
        bodies.check_supported(self.model_extra or {}, _UNSUPPORTED_OF_SCORES)
        _check_together(len(self.query), (len(item.text or item.tokens or ()) for item in self.items))
        prompts = [self._prompt(item) for item in self.items]
        request = self._request(request_id, slo, arrival_s, prompts, "items")
        request.sampling.label_token_ids.extend(self.label_token_ids)
        return request

    def _prompt(self, item: Prompt) -> Prompt:
        query = self.query
        if isinstance(query, str) and item.text is not None:
            return Prompt(text=item.text + query if self.item_first else query + item.text)
        if isinstance(query, list) and item.tokens is not None:
            return Prompt(tokens=[*item.tokens, *query] if self.item_first else [*query, *item.tokens])
        raise BadField("'query' and 'items' must be both texts, or both token ids.", "items")


class RerankRequest(_Body):
    """The body of /v1/rerank, as Jina, Cohere and vLLM take it."""

    query: str = Field(pattern=r"\S")
    documents: Annotated[list[str], pydantic.PlainValidator(_documents)]
    top_n: int | None = Field(None, ge=1, lt=bodies.INT64)
    return_documents: bool | None = None
    instruct: str | None = None

    def request(self, request_id: str, slo: common_pb2.Slo, arrival_s: float) -> Request:
        """The gateway's request made of the body. Raises BadField."""
        bodies.check_supported(self.model_extra or {}, _UNSUPPORTED_OF_RANKS)
        _check_together(len(self.query) + len(self.instruct or ""), map(len, self.documents))
        prompts = [Prompt(pair=QueryDocument(self.query, text, self.instruct or "")) for text in self.documents]
        return self._request(request_id, slo, arrival_s, prompts, "documents")


class ScoreEndpoint(Endpoint[ScoreRequest]):
    """The ASGI app of /v1/score."""

    path = "/v1/score"
    operation = "score"

    def _parse(self, data: bytes) -> ScoreRequest:
        return bodies.parse(ScoreRequest, data)

    async def _answer(self, body: ScoreRequest, request: Request, reply: Reply, caller: Caller) -> None:
        with await self._serving.begin(request, reply.span, caller) as served:
            reply.add(await caller.headers())

            def scored(choice: Choice) -> list[float]:
                return reranking.probabilities(_logprobs(choice), among_themselves=bool(body.apply_softmax))

            scores = await gathered(scored, served.choices)
            answer = {"object": "scoring", "scores": scores, "model": request.model, "usage": _usage(served)}
            await reply.whole(orjson.dumps(answer))


class RerankEndpoint(Endpoint[RerankRequest]):
    """The ASGI app of /v1/rerank, and of the paths by which clients of others call it."""

    path = "/v1/rerank"
    others = ("/rerank", "/v2/rerank")
    """vLLM's, Jina's and Infinity's clients; Cohere's."""
    operation = "rerank"

    def _parse(self, data: bytes) -> RerankRequest:
        return bodies.parse(RerankRequest, data)

    async def _answer(self, body: RerankRequest, request: Request, reply: Reply, caller: Caller) -> None:
        with await self._serving.begin(request, reply.span, caller) as served:
            reply.add(await caller.headers())
            scores = await gathered(_relevance, served.choices)
            results = []
            for index in sorted(range(len(scores)), key=lambda index: -scores[index])[: body.top_n]:
                result: dict[str, Any] = {"index": index, "relevance_score": scores[index]}
                if body.return_documents is not False:
                    result["document"] = {"text": body.documents[index]}
                results.append(result)
            answer = {
                "id": f"rerank-{request.request_id}",
                "object": "list",
                "model": request.model,
                "results": results,
                "usage": _usage(served),
            }
            await reply.whole(orjson.dumps(answer))


def _relevance(choice: Choice) -> float:
    """How well a document answers. Raises Unavailable if no engine has said it."""
    if choice.answer.embedding:
        return reranking.relevance_of_logit(choice.answer.embedding[0])
    return reranking.relevance(_logprobs(choice))


def _logprobs(choice: Choice) -> Sequence[float]:
    """Log-probabilities of the request's label tokens. Raises Unavailable if none came."""
    found = choice.answer.label_logprobs
    if not found:  # the gpu_scheduler is older than scores
        raise Unavailable("an engine returned no log-probabilities of label tokens")
    return found


def _usage(served: Served) -> dict[str, int]:
    tokens = sum(map(len, served.prompts))
    return {"prompt_tokens": tokens, "total_tokens": tokens}
