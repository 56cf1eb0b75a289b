"""OpenAI's requests: the fields of a body, checked, and turned into the gateway's own form.

A field that Prism does not know is ignored, as clients send many. A field that it knows it cannot honour, and that
would change the answer, is refused by name. Values are taken as JSON has them: "5" is not 5.
"""

from __future__ import annotations

import contextlib
import difflib
import json
import re
from collections.abc import Mapping, Sequence, Set
from dataclasses import replace
from typing import Annotated, Any, Literal, TypeVar

import pydantic
import pydantic_core
from pydantic import Field

from gateway.errors import BadField
from gateway.http import surrogates
from gateway.request import Prompt, Request
from gateway.text import sampling_defaults
from gateway.tools import grammar as tools_grammar
from gateway.tools import request as calling
from gateway.tools import structured_outputs
from gateway.tools.formats import ENFORCED
from protos import common_pb2
from tokenization.chat import TAKEN

MOST_CHOICES = 128
MOST_PROMPTS = 512
MOST_STOPS = 4
MOST_STOP_CHARACTERS = 1024
MOST_MESSAGES = 1 << 14
MOST_PARTS = 1 << 14
"""The most parts of all contents in a conversation, its calls of tools included."""
MOST_IDS = 1 << 21
"""The most token ids in a list; no context is as long."""
MOST_STOP_TOKENS = 1024
"""The most stop tokens; every choice of a request carries them."""
MOST_TOP_LOGPROBS = 20
INT64 = 1 << 63
_ROLES_WITH_CONTENT = ("system", "developer", "user")
"""Roles whose messages have a content; those of others may have calls of tools in its place."""
_TOKENS = 1 << 32
"""Bound of token ids; tokenizers know no larger ones."""


def _stops(value: Any) -> tuple[str, ...]:
    if value is None:
        return ()
    stops = [value] if isinstance(value, str) else value
    if not isinstance(stops, list) or not all(isinstance(stop, str) for stop in stops):
        raise ValueError("must be a string or a list of strings")
    if len(stops) > MOST_STOPS:
        raise ValueError(f"at most {MOST_STOPS} strings, not {len(stops)}")
    if not all(stops):
        raise ValueError("a stop string cannot be empty")
    if (longest := max(map(len, stops), default=0)) > MOST_STOP_CHARACTERS:
        raise ValueError(f"a stop string has at most {MOST_STOP_CHARACTERS} characters, not {longest}")
    return tuple(stops)


def is_token(value: Any) -> bool:
    """Whether the value is an integer that may be a token's id."""
    return type(value) is int and 0 <= value < INT64


def prompts(value: Any, most: int = MOST_PROMPTS) -> list[Prompt]:
    """Prompts from a string, a list of strings, a list of token ids, or a list of lists of token ids. Raises
    ValueError."""
    if isinstance(value, str):
        return [Prompt(text=value)]
    if isinstance(value, list) and value:
        if isinstance(value[0], (str, list)) and len(value) > most:
            raise ValueError(f"at most {most} prompts, not {len(value)}")
        if len(value) > MOST_IDS:
            raise ValueError(f"at most {MOST_IDS} token ids, not {len(value)}")
        if all(map(is_token, value)):
            return [Prompt(tokens=value)]
        if all(isinstance(prompt, str) for prompt in value):
            return [Prompt(text=prompt) for prompt in value]
        if all(isinstance(prompt, list) and prompt and all(map(is_token, prompt)) for prompt in value):
            return [Prompt(tokens=prompt) for prompt in value]
    raise ValueError("must be a string, a list of strings, a list of token ids or a list of lists of token ids")


Content = str | list[dict[str, str]]


def _content(value: Any) -> Content:
    """A message's content: text, or a list of text parts, which the model's chat template may want one by one. Raises
    ValueError."""
    if value is None:
        return ""
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise ValueError("must be a string or a list of text parts")
    parts = []
    for part in value:
        if not isinstance(part, dict) or not isinstance(part.get("type"), str):
            raise ValueError("each part must be an object with a type")
        if part["type"] != "text":
            raise ValueError(f"parts of type '{part['type']}' are not supported, only 'text'")
        if not isinstance(part.get("text"), str):
            raise ValueError("a text part needs a string 'text'")
        parts.append({"type": "text", "text": part["text"]})
    return parts


class _Model(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(extra="ignore", strict=True, protected_namespaces=())


def _few_parts(value: Any) -> Any:
    """A content, or a list of messages or other items, before it is checked part by part: that takes long. Raises
    ValueError."""
    if isinstance(value, list):
        if len(value) > MOST_MESSAGES:
            raise ValueError(f"at most {MOST_MESSAGES} items, not {len(value)}")
        lists = [each for item in value if isinstance(item, dict) for each in item.values() if isinstance(each, list)]
        count = sum(map(len, lists))
        if count <= MOST_PARTS:  # parts have lists too: results of tools
            parts = (part for each in lists for part in each if isinstance(part, dict))
            count += sum(len(each) for part in parts for each in part.values() if isinstance(each, list))
        if count > MOST_PARTS:
            raise ValueError(f"its contents have at most {MOST_PARTS} parts, not {count}")
    return value


FEW_PARTS = pydantic.BeforeValidator(_few_parts)


class StreamOptions(_Model):
    include_usage: bool | None = None


Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
"""Efforts that clients know. Those of a template's own go by `chat_template_kwargs`."""


class ChatMessage(_Model):
    model_config = pydantic.ConfigDict(extra="allow", strict=True)

    role: str
    content: Annotated[Content, pydantic.PlainValidator(_content)] = ""


_UNSUPPORTED: dict[str, Sequence[Any]] = {
    # Fields that would change the answer, and the values beside null with which they do not.
    "functions": (),
    "function_call": (),
    "logit_bias": ({},),
    "modalities": (["text"],),
    "audio": (),
    "web_search_options": (),
    "suffix": ("",),
    "best_of": (1,),
    "use_beam_search": (False,),
    "guided_json": (),
    "guided_regex": (),
    "guided_choice": (),
    "guided_grammar": (),
    "structured_outputs": (),
    "chat_template": (),
    "truncate_prompt_tokens": (),
    "include_stop_str_in_output": (False,),
    "prompt_logprobs": (),
    "return_tokens_as_token_ids": (False,),
}
_OF_PROMPTS = {
    name: _UNSUPPORTED[name] for name in ("functions", "function_call", "chat_template", "truncate_prompt_tokens")
}
"""Those of the unsupported fields that would change the prompt."""


def check_supported(given: Mapping[str, Any], table: Mapping[str, Sequence[Any]]) -> None:
    """Raises BadField for a field of `table` that is given and would change the answer. The table has the values beside
    null with which a field does not."""
    for name, value in given.items():
        # 0 is not false, and true is not 1.
        harmless = any(type(value) is type(one) and value == one for one in table.get(name, ()))
        if name in table and value is not None and not harmless:
            raise BadField(f"'{name}' is not supported.", name, "unsupported_parameter")


class _Generate(_Model):
    """The fields that chat and completion requests share: OpenAI's, and those that vLLM and SGLang have in common."""

    model_config = pydantic.ConfigDict(extra="allow", strict=True, protected_namespaces=())

    model: str = Field(min_length=1)
    n: int | None = Field(None, ge=1, le=MOST_CHOICES)
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    stop: Annotated[tuple[str, ...], pydantic.PlainValidator(_stops)] = ()
    max_tokens: int | None = Field(None, ge=1, lt=INT64)
    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, gt=0, le=1)
    seed: int | None = Field(None, ge=-INT64, lt=INT64)
    presence_penalty: float | None = Field(None, ge=-2, le=2)
    frequency_penalty: float | None = Field(None, ge=-2, le=2)
    repetition_penalty: float | None = Field(None, gt=0, le=2)
    top_k: int | None = Field(None, ge=-1, lt=1 << 31)
    min_p: float | None = Field(None, ge=0, le=1)
    min_tokens: int | None = Field(None, ge=0, lt=INT64)
    ignore_eos: bool | None = None
    stop_token_ids: list[Annotated[int, Field(ge=0, lt=INT64)]] | None = Field(None, max_length=MOST_STOP_TOKENS)
    skip_special_tokens: bool | None = None
    service_tier: str | None = None
    response_format: Annotated[str | None, pydantic.PlainValidator(structured_outputs.of_format)] = None
    regex: str | None = None
    ebnf: str | None = None
    json_schema: str | None = None

    @property
    def streams(self) -> bool:
        return bool(self.stream)

    @property
    def usage_asked(self) -> bool:
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    def _logprobs(self) -> tuple[bool, int]:
        """Whether log-probabilities are wanted, and for how many tokens beside the chosen one."""
        raise NotImplementedError

    def _limit(self) -> tuple[int | None, str]:
        """The most tokens of an answer, and the field that set it."""
        return self.max_tokens, "max_tokens"

    def _check(self) -> None:
        check_supported(self.model_extra or {}, _UNSUPPORTED)
        if self.stream_options is not None and not self.streams:
            raise BadField("'stream_options' is only allowed when 'stream' is true.", "stream_options")
        limit = self._limit()[0]
        if limit is not None and (self.min_tokens or 0) > limit:
            raise BadField(f"'min_tokens' is {self.min_tokens}, above the limit of {limit}.", "min_tokens")

    def _targets(self, slo: common_pb2.Slo) -> common_pb2.Slo:
        """The targets of the headers; OpenAI's tier for work that can wait has none, unless the headers say some."""
        return common_pb2.Slo(best_effort=True) if self.service_tier == "flex" and not slo.ListFields() else slo

    def _grammar(self) -> tuple[str, dict[str, str]]:
        """(field that asks for a grammar, the grammar as Sampling has it). Raises BadField."""
        field, grammar = structured_outputs.asked(
            self.response_format, regex=self.regex, ebnf=self.ebnf, json_schema=self.json_schema
        )
        self._alone(field)
        return field, grammar

    def _alone(self, field: str) -> None:
        """Raises BadField for limits given beside `field`, which asks for a grammar: a grammar itself says where an
        answer ends."""
        for other, given in (("min_tokens", self.min_tokens), ("ignore_eos", self.ignore_eos)):
            if field and given:
                raise BadField(f"'{other}' cannot be given beside '{field}'.", other)

    def _left_open(self) -> frozenset[str]:
        return frozenset(name for name in sampling_defaults.OPEN if getattr(self, name) is None)

    def _sampling(self, default_limit: int, grammar: dict[str, str]) -> common_pb2.Sampling:
        logprobs, top = self._logprobs()
        limit = self._limit()[0]
        sampling = common_pb2.Sampling(
            max_new_tokens=default_limit if limit is None else limit,
            temperature=1.0 if self.temperature is None else self.temperature,
            top_p=self.top_p or 0.0,
            top_k=max(self.top_k or 0, 0),
            min_p=self.min_p or 0.0,
            frequency_penalty=self.frequency_penalty or 0.0,
            presence_penalty=self.presence_penalty or 0.0,
            repetition_penalty=self.repetition_penalty or 0.0,
            stop_token_ids=self.stop_token_ids or (),
            ignore_eos=bool(self.ignore_eos),
            min_new_tokens=self.min_tokens or 0,
            logprobs=logprobs,
            top_logprobs=top,
            prompt_only=limit == 0,
            **grammar,  # type: ignore[arg-type]
        )
        if self.seed is not None:
            sampling.seed = self.seed
        return sampling


def _check_called(id: Any, called: Set[Any], field: str) -> None:
    """Raises BadField for a tool's result whose call, by its id, is not among those before it. A result without an id
    is its place's."""
    if id is None:
        return
    if not isinstance(id, str):
        raise BadField(f"Invalid '{field}': must be a string", field, "invalid_type")
    if id not in called:
        raise BadField(f"Invalid '{field}': no call before it has the id '{id[:40]}'", field)


class _Conversation(_Model):
    """Messages, and the other fields from which a chat template makes a prompt."""

    messages: Annotated[
        list[ChatMessage] | None, Field(min_length=1, max_length=MOST_MESSAGES, fail_fast=True), FEW_PARTS
    ] = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    add_special_tokens: bool | None = None
    tools: list[calling.Tool] | None = Field(None, fail_fast=True)
    tool_choice: Annotated[str | None, pydantic.PlainValidator(calling.choice)] = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: Effort | None = None
    enable_thinking: bool | None = None

    def called(self) -> calling.Tools | None:
        """The tools that an answer may call; None if there are none. Raises BadField."""
        try:
            return calling.asked(self.tools, self.tool_choice, self.parallel_tool_calls)
        except ValueError as error:
            field, what = error.args
            raise BadField(f"Invalid '{field}': {what}", field) from None

    def conversation(self, called: calling.Tools | None) -> Prompt:
        """The prompt; the template is given the tools in `called` too. Raises BadField."""
        if self.add_special_tokens:
            what = "'add_special_tokens' is not supported beside 'messages': the chat template writes what a chat has."
            raise BadField(what, "add_special_tokens", "unsupported_parameter")
        options = self._options()
        if called is not None:
            options["tools"] = called.for_template()
        return Prompt(messages=self._shown(), template_options=options)

    def _shown(self) -> list[Mapping[str, Any]]:
        told: list[Mapping[str, Any]] = []
        called: set[Any] = set()
        for index, message in enumerate(self.messages or ()):
            if message.role in _ROLES_WITH_CONTENT and "content" not in message.model_fields_set:
                field = f"messages[{index}].content"
                raise BadField(f"Missing required parameter: '{field}'.", field, "missing_required_parameter")
            try:
                told.append(calling.for_template(message.model_dump()))
            except ValueError as error:
                field = f"messages[{index}].tool_calls"
                raise BadField(f"Invalid '{field}': {error}", field) from None
            if message.role == "tool":
                _check_called(told[-1].get("tool_call_id"), called, f"messages[{index}].tool_call_id")
            called.update(call.get("id") for call in told[-1].get("tool_calls") or ())
        return told

    def _options(self) -> dict[str, Any]:
        options = dict(self.chat_template_kwargs or {})
        if taken := next((name for name in options if name in TAKEN), None):
            field = f"chat_template_kwargs.{taken}"
            instead = f": '{taken}' is a field of its own" if taken in type(self).model_fields else ""
            raise BadField(f"'{field}' is not supported{instead}.", field, "unsupported_parameter")
        thinks = self.enable_thinking
        if self.reasoning_effort is not None:
            options.setdefault("reasoning_effort", self.reasoning_effort)
            thinks = self.reasoning_effort != "none" if thinks is None else thinks
        if thinks is not None:  # templates have one of the two
            options = {"enable_thinking": thinks, "thinking": thinks, **options}
        if self.continue_final_message:
            options |= {"continue_final_message": True, "add_generation_prompt": False}
        elif self.add_generation_prompt is not None:
            options["add_generation_prompt"] = self.add_generation_prompt
        return options

    def _thinks(self) -> bool:
        """Whether an answer may begin with reasoning: it was not switched off, and the answer begins a message."""
        options = self._options()
        off = any(options.get(name) is False for name in ("enable_thinking", "thinking"))
        return not off and not self.continue_final_message


class ChatRequest(_Conversation, _Generate):
    """The body of /v1/chat/completions."""

    messages: Annotated[list[ChatMessage], Field(min_length=1, max_length=MOST_MESSAGES, fail_fast=True), FEW_PARTS]
    max_completion_tokens: int | None = Field(None, ge=1, lt=INT64)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=MOST_TOP_LOGPROBS)
    separate_reasoning: bool | None = None

    def _logprobs(self) -> tuple[bool, int]:
        return bool(self.logprobs), self.top_logprobs or 0

    def _limit(self) -> tuple[int | None, str]:
        if self.max_completion_tokens is not None:
            return self.max_completion_tokens, "max_completion_tokens"
        return self.max_tokens, "max_tokens"

    def request(self, request_id: str, slo: common_pb2.Slo, arrival_s: float) -> Request:
        """The gateway's request made of the body. Raises BadField."""
        self._check()
        if self.top_logprobs and not self.logprobs:
            raise BadField("'top_logprobs' needs 'logprobs' to be true.", "top_logprobs")
        called = self.called()
        field, grammar = self._grammar()
        if called is not None:
            if field not in ("", "response_format"):
                raise BadField(f"'{field}' beside 'tools' needs a 'tool_choice' of 'none'.", field)
            if called.must:
                self._alone("tool_choice")
                field, grammar = "tools", {"ebnf": tools_grammar.of(called, ENFORCED)}
            elif field:  # it depends on how the model writes its calls, which is known once its tokenizer is
                called, grammar = replace(called, answer=self.response_format), {}
                tools_grammar.of(called, ENFORCED)
        return Request(
            request_id=request_id,
            model=self.model,
            arrival_s=arrival_s,
            prompts=[self.conversation(called)],
            sampling=self._sampling(default_limit=0, grammar=grammar),
            limit_given=self._limit()[0] is not None,
            slo=self._targets(slo),
            prompt_field="messages",
            limit_field=self._limit()[1],
            choices=self.n or 1,
            left_open=self._left_open(),
            stops=self.stop,
            show_special=self.skip_special_tokens is False,
            grammar_field=field,
            tools=called,
            # Calls that must be made are looked for at the beginning, where reasoning would be if it is not split off.
            thinks=self._thinks() and (self.separate_reasoning is not False or called is None or not called.must),
            separates=self.separate_reasoning is not False,
            streams=self.streams,
        )


class CompletionRequest(_Generate):
    """The body of /v1/completions."""

    prompt: Annotated[list[Prompt], pydantic.PlainValidator(prompts)]
    max_tokens: int | None = Field(None, ge=0, lt=INT64)
    logprobs: int | None = Field(None, ge=0, le=MOST_TOP_LOGPROBS)
    echo: bool | None = None

    def _logprobs(self) -> tuple[bool, int]:
        return self.logprobs is not None, self.logprobs or 0

    def request(self, request_id: str, slo: common_pb2.Slo, arrival_s: float) -> Request:
        """The gateway's request made of the body. Raises BadField."""
        self._check()
        field, grammar = self._grammar()
        sampling = self._sampling(default_limit=16, grammar=grammar)
        if self.echo and self.logprobs is not None:
            sampling.prompt_logprobs_from = 1
        return Request(
            request_id=request_id,
            model=self.model,
            arrival_s=arrival_s,
            prompts=self.prompt,
            sampling=sampling,
            limit_given=self._limit()[0] is not None,
            slo=self._targets(slo),
            prompt_field="prompt",
            numbered=len(self.prompt) > 1,
            choices=self.n or 1,
            left_open=self._left_open(),
            stops=self.stop,
            show_special=self.skip_special_tokens is False,
            grammar_field=field,
        )


class TokenizeRequest(_Conversation):
    """The body of /tokenize: a prompt, or messages with all that a chat may have beside them."""

    model_config = pydantic.ConfigDict(extra="allow", strict=True, protected_namespaces=())

    model: str = Field(min_length=1)
    prompt: str | None = None
    return_token_strs: bool | None = None

    def tokenized(self) -> tuple[Prompt, str, calling.Tools | None]:
        """The prompt, the field that has it, and the tools that an answer to it may call. Raises BadField; for messages
        if a chat with them would."""
        if (self.prompt is None) == (self.messages is None):
            raise BadField("Give one of 'prompt' and 'messages'.", "prompt")
        check_supported(self.model_extra or {}, _OF_PROMPTS)
        if self.prompt is not None:
            return Prompt(text=self.prompt, special=self.add_special_tokens is not False), "prompt", None
        called = self.called()
        if called is not None and called.must:
            tools_grammar.of(called, ENFORCED)
        return self.conversation(called), "messages", called


class DetokenizeRequest(_Model):
    """The body of /detokenize."""

    model: str = Field(min_length=1)
    tokens: list[Annotated[int, Field(ge=0, lt=_TOKENS)]] = Field(max_length=MOST_IDS, fail_fast=True)


M = TypeVar("M", bound=pydantic.BaseModel)
_CODES = {
    "missing": "missing_required_parameter",
    "extra_forbidden": "unknown_parameter",
    "greater_than": "below_min_value",
    "greater_than_equal": "below_min_value",
    "less_than": "above_max_value",
    "less_than_equal": "above_max_value",
    "too_short": "array_too_short",
    "too_long": "array_too_long",
    "string_too_short": "empty_string",
    "value_error": "invalid_value",
    "literal_error": "invalid_value",
    "string_pattern_mismatch": "invalid_value",
}


_LIBRARY_WORDS = re.compile(r"^(Input|List|String|Dictionary|Tuple|Set) should")
"""Beginning of the library's messages, which are of its own objects: here they follow the name of a field."""


def parse(kind: type[M], body: bytes) -> M:
    """The checked body. Raises BadField that names the first wrong field; for a body that is not JSON it names none."""
    _check_numbers(body)
    try:
        return kind.model_validate_json(body)
    except pydantic.ValidationError as error:
        problem = _first(error, kind)
    if problem["type"] == "json_invalid":
        if (whole := surrogates.mended(body)) is not None:
            return parse(kind, whole)
        raise BadField(f"The body is not JSON: {problem['msg']}", None, "invalid_json")
    raise _refusal(problem)


def _check_numbers(body: bytes) -> None:
    """Raises BadField for a body with NaN or Infinity as a value, which the library takes and JSON does not have."""
    if b"NaN" not in body and b"Infinity" not in body:
        return

    def refuse(name: str) -> None:
        raise BadField(f"The body is not JSON: {name} is no number", None, "invalid_json")

    with contextlib.suppress(ValueError, RecursionError):  # whatever else is wrong with it the library says better
        json.loads(body, parse_constant=refuse)


def made(kind: type[M], fields: Mapping[str, Any]) -> M:
    """The checked body that has these fields. Raises BadField that names the first wrong one."""
    try:
        return kind.model_validate(fields)
    except pydantic.ValidationError as error:
        raise _refusal(_first(error, kind)) from None


def _first(error: pydantic.ValidationError, kind: type[pydantic.BaseModel]) -> pydantic_core.ErrorDetails:
    problem = error.errors(include_url=False, include_input=False)[0]
    if problem["type"] == "extra_forbidden":
        near = difflib.get_close_matches(str(problem["loc"][-1]), kind.model_fields, 1)
        problem["msg"] = f"unknown; the nearest one is '{near[0]}'" if near else "unknown"
    return problem


def _refusal(problem: pydantic_core.ErrorDetails) -> BadField:
    """The error for what is wrong with a field. Names in `<>` are those of a union's kinds, and no fields."""
    what, kind = _LIBRARY_WORDS.sub("it should", problem["msg"].removeprefix("Value error, ")), problem["type"]
    what = what.partition(" after validation")[0]
    field = ""
    for part in problem["loc"]:
        if isinstance(part, int):
            field += f"[{part}]"
        elif not (part.startswith("<") and part.endswith(">")):
            field += f".{part}" if field else part
    if kind == "union_tag_invalid":
        said = problem["ctx"]["tag"].strip("<>")[:40]
        return BadField(f"'{field}.type' of '{said}' is not supported.", f"{field}.type", "unsupported_parameter")
    if kind == "union_tag_not_found":
        return BadField(f"Invalid '{field}': must be an object with a type", field, "invalid_type")
    if kind == "missing":
        return BadField(f"Missing required parameter: '{field}'.", field, "missing_required_parameter")
    if not field:
        return BadField("The body must be a JSON object.", None, "invalid_type")
    return BadField(f"Invalid '{field}': {what}", field, _CODES.get(kind, "invalid_type"))


def model_of(body: bytes) -> str:
    """The model that a faulty body names; empty if none can be found."""
    try:
        said = pydantic_core.from_json(body)
    except ValueError:
        return ""
    model = said.get("model") if isinstance(said, dict) else None
    return model if isinstance(model, str) else ""
