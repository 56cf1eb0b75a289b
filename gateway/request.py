"""A request in the gateway's own form, whichever API it came by."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from gateway.tools.request import Tools
from protos import common_pb2
from services.telemetry.spans import UNTRACED, Span


@dataclass(frozen=True, slots=True)
class QueryDocument:
    """A query, and a document that may answer it."""

    query: str
    document: str
    instruction: str = ""
    """What makes a document an answer; empty: as the model has it."""

    @property
    def characters(self) -> int:
        return len(self.query) + len(self.document) + len(self.instruction)


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt; exactly one of text, tokens, messages and pair is given."""

    text: str | None = None
    special: bool = True
    """Whether the tokenizer may add the special tokens that it puts around a text by default."""
    tokens: Sequence[int] | None = None
    messages: Sequence[Mapping[str, Any]] | None = None
    template_options: Mapping[str, Any] = field(default_factory=dict)
    """Options of the chat template, by its own names."""
    pair: QueryDocument | None = None

    @property
    def characters(self) -> int:
        """Approximate number of characters to tokenize."""
        if self.pair is not None:
            return self.pair.characters
        if self.messages is not None:
            # Templates write out names and arguments of calls too.
            return len(str(self.messages)) + len(str(self.template_options))
        return len(self.text or "")


@dataclass(frozen=True, slots=True)
class Request:
    """A client's request: each of `prompts`, answered `choices` times."""

    request_id: str
    model: str
    """The model's own name, once `Serving.resolve` has looked for aliases."""
    arrival_s: float
    """Second of time.monotonic, which the loop's clock agrees with but for its steps of a millisecond."""
    prompts: Sequence[Prompt]
    sampling: common_pb2.Sampling
    """Sampling with OpenAI's defaults for what the client left open. max_new_tokens 0: as many as the context leaves,
    or none with `prompt_only`."""
    limit_given: bool
    """Whether the client gave max_new_tokens. If so, a value above what the context leaves is refused, unless the
    gateway is set to cut it; a default is always cut."""
    slo: common_pb2.Slo
    """Targets as the client gave them; 0 stands for the model's default."""
    alias: str = ""
    """Alias by which the client asked for the model; empty: by its name."""
    prompt_field: str = "prompt"
    """Name, in errors, of the field that prompts came from; `limit_field` is that of the limit."""
    limit_field: str = "max_tokens"
    choices: int = 1
    left_open: frozenset[str] = frozenset()
    """Names in `sampling_defaults.OPEN` that the client did not set."""
    stops: tuple[str, ...] = ()
    show_special: bool = False
    """Whether special tokens become text."""
    grammar_field: str = ""
    """Name, in errors, of the field that the grammar came from."""
    tools: Tools | None = None
    """Tools that answers may call."""
    thinks: bool = False
    """Whether an answer may begin with the model's reasoning, to which the grammar does not apply."""
    separates: bool = False
    """Whether reasoning is split from the rest of an answer, if the model reasons."""
    streams: bool = False
    """Whether parts of an answer are wanted while it is made."""
    embeds: bool = False
    """Whether the prompts' embeddings are wanted instead of answers."""
    numbered: bool = False
    """Whether errors name a prompt by its place in the prompts' field."""
    few_at_once: bool = False
    """Whether only some of the answers are under way together, so that a request may have more than a gateway takes."""
    dimensions: int | None = None
    """Dimensions of an embedding; None: the model's."""

    @property
    def ranks(self) -> bool:
        """Whether its prompts are documents to be ranked."""
        return bool(self.prompts) and self.prompts[0].pair is not None

    def field_of(self, index: int) -> str:
        """Name, in errors, of the field that prompt `index` came from."""
        return f"{self.prompt_field}[{index}]" if self.numbered else self.prompt_field


@dataclass(frozen=True, slots=True)
class AnswerJob:
    """One answer, or embedding, to be made: one prompt as token ids, checked against its model."""

    request_id: str
    model: str
    token_ids: Sequence[int]
    sampling: common_pb2.Sampling
    slo: common_pb2.Slo
    """Targets with the model's defaults filled in."""
    arrival_s: float
    embeds: bool = False
    span: Span = UNTRACED
    """Span of the request."""
    grammar_field: str = ""
    """Name, in errors, of the field that the grammar came from, if the answer has to follow one."""
