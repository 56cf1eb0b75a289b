"""The part that the HTTP and the gRPC API share: from a request to the start of its answers.

`Serving.begin` looks up the route, tokenizes, checks the prompt against its model and counts the request in; then the
answers are read from the `Served` that it returns. A route with a place costs no call to any other process.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace

from gateway import metrics
from gateway.access.access import ANYBODY, Caller
from gateway.access.quotas import UNSAID_TOKENS, Charge
from gateway.access.usage import UsageLog
from gateway.errors import BadField, ModelFaulty, TooMany
from gateway.openai import vectors
from gateway.parsing.parsers import NOTHING, Parsers, ReasoningState, Splitter, Wanted, reasoning_state
from gateway.request import AnswerJob, Prompt, Request
from gateway.routing.relay import Relay
from gateway.routing.routes import Route, RouteTable
from gateway.served import Choice, Served
from gateway.text import echo, reranking, sampling_defaults
from gateway.text.answer import Answer
from gateway.text.tokenizers import Tokenizers
from gateway.tools import formats as calls
from gateway.tools import grammar as tools_grammar
from gateway.tools import structural_tags, structured_outputs
from gateway.tools.request import Tools
from protos import common_pb2
from services.errors import Invalid, Unavailable, Unmet
from services.telemetry.spans import UNTRACED, Span
from services.wording.plurals import agreeing, counted
from tokenization.chat import WrongMessage
from tokenization.tokenizer import Tokenizer, TooLong


class Serving:
    """The gateway, without its servers."""

    def __init__(
        self,
        routes: RouteTable,
        tokenizers: Tokenizers,
        relay: Relay,
        *,
        most_in_flight: int,
        models_defaults: bool = True,
        cut_to_context: bool = False,
        parsers: Parsers | None = None,
        usage: UsageLog | None = None,
    ) -> None:
        """`models_defaults`: a model's own sampling defaults hold where a client gives none. `cut_to_context`: an
        answer that may be longer than what the context leaves is cut to that."""
        self.routes = routes
        self._models_defaults = models_defaults
        self._cut_to_context = cut_to_context
        self._tokenizers = tokenizers
        self._relay = relay
        self._parsers = parsers or Parsers()
        self.usage = usage or UsageLog("")
        self._most_in_flight = most_in_flight
        self._in_flight = 0
        self.leaving = False
        """Whether the gateway is about to stop: it serves on, but load balancers should use others."""
        self._draining = False
        self._idle = asyncio.Event()
        self._idle.set()

    async def begin(self, request: Request, span: Span = UNTRACED, caller: Caller = ANYBODY) -> Served:
        """Starts making the answers for `caller`. The code that calls this leaves the result's `with` block when it is
        done with them or gives up. `span` gets the outcome; the calling code ends it. Raises UnknownModel, BadField,
        TooMany, OverLimit, ModelFaulty, Unavailable."""
        if self._draining:
            raise Unavailable("this gateway is stopping")
        caller.check_model(request.model, request.alias)
        route = self.routes.get(request.model)
        if route.faulty:  # before its sizes are looked at: a broken checkpoint has none
            raise route.fault
        if not route.model.context_tokens:
            # An engine has it, but its files cannot be read now, and were not since placement started.
            raise Unavailable(f"the files of model '{request.model}' cannot be read now")
        vectors.check(request, route.model)
        count = len(request.prompts) * request.choices
        structured_outputs.check(request.sampling, count, request.grammar_field)
        if request.few_at_once:
            count = min(count, vectors.MOST_AT_ONCE)
        self._take(count, caller)
        tokenizing = span.child("tokenize")
        try:
            await caller.take_request()
            tokenizer = await self.tokenizer(route)
            wanted = await self.parsers_of(request.tools, _reasons(request), tokenizer, route)
            if request.tools is not None:
                _hold_to(request.tools, request.sampling, wanted)
                structured_outputs.check(request.sampling, count, request.grammar_field or "tools")
            asked = request.prompts
            if request.ranks and route.model.HasField("embedding"):  # a cross-encoder, by `vectors.check`
                request = replace(request, embeds=True)
                reranking.check_pairs(asked, route.model)
            elif request.ranks:
                ranks = reranking.form(tokenizer, route.model)
                request.sampling.label_token_ids.extend((ranks.yes, ranks.no))
                asked = [ranks.prompt(prompt.pair) for prompt in asked if prompt.pair is not None]
            # Many short prompts hold up other requests' streams as one long prompt does.
            together = sum(prompt.characters for prompt in asked)
            prompts = [
                await self.encode(tokenizer, prompt, request.field_of(index), together, route.model.context_tokens)
                for index, prompt in enumerate(asked)
            ]
            echo.check(request, prompts)
            ends = () if request.embeds else sorted(tokenizer.end_ids)
            jobs = [
                job for index, ids in enumerate(prompts) for job in self._jobs(request, route, index, ids, ends, span)
            ]
            if request.thinks:
                for job in jobs:
                    _think_first(job, wanted, tokenizer)
            charge = await self._hold(caller, request, prompts, jobs)
        except BaseException:
            self.ended(count, caller)
            raise
        finally:
            tokenizing.end()
        metrics.PROMPT_TOKENS.labels(request.model).inc(sum(map(len, prompts)))
        choices = [
            Choice(
                index,
                job,
                Answer(
                    tokenizer,
                    before=job.token_ids,
                    stops=request.stops,
                    show_special=request.show_special,
                    show_marks=splitter is not None,
                ),
                self._relay.open(job),
                splitter,
            )
            for index, job in enumerate(jobs)
            for splitter in (self._splitter(request, wanted, tokenizer, job),)
        ]
        return Served(
            request, tokenizer, prompts, choices, span, caller, charge, self.usage, lambda: self.ended(count, caller)
        )

    async def parsers_of(self, tools: Tools | None, reasons: bool, tokenizer: Tokenizer, route: Route) -> Wanted:
        """The parsers for the model's answers. `reasons`: whether it matters that the model reasons. Raises BadField
        for tools that the model cannot be given, Unavailable."""
        if tools is None:
            return await self._parsers.wanted(tokenizer, route.model.reasoning_parser) if reasons else NOTHING
        if "tools" not in tokenizer.template:
            raise BadField("The model's chat template takes no tools.", "tools", "unsupported_parameter")
        model = route.model
        wanted = await self._parsers.wanted(tokenizer, model.reasoning_parser, model.tool_parser, calls=True)
        if not tools.must and not wanted.tools:
            raise calls.unknown()
        return wanted

    def _splitter(self, request: Request, wanted: Wanted, tokenizer: Tokenizer, job: AnswerJob) -> Splitter | None:
        return self._parsers.splitter(
            wanted,
            tokenizer,
            job.token_ids,
            request.tools,
            separates=request.separates,
            whole=not request.streams,
        )

    async def _hold(
        self, caller: Caller, request: Request, prompts: Sequence[Sequence[int]], jobs: Sequence[AnswerJob]
    ) -> Charge:
        """Holds the tokens that the request may use, of the caller's tokens a minute. Raises OverLimit."""
        if request.embeds or request.sampling.prompt_only:
            return await caller.hold(sum(map(len, prompts)), 0, True)
        said = request.sampling.max_new_tokens > 0
        most = (job.sampling.max_new_tokens for job in jobs)
        answers = sum(most if said else (min(each, UNSAID_TOKENS) for each in most))
        return await caller.hold(sum(map(len, prompts)), answers, said)

    def fault(self, route: Route) -> str:
        """Why every request for a model is refused, by its route or because this gateway cannot read its tokenizer;
        empty if it can be served."""
        if route.faulty:
            return route.error or "it is in error"
        failure = self._tokenizers.failure(route.model.path, route.model.generation)
        return f"at this gateway {failure}" if failure else ""

    def tell_faults(self, *_: object) -> None:
        """Sets the metric of models that cannot be served. To be called when routes or tokenizers have changed."""
        for route in self.routes.all():
            metrics.UNUSABLE.labels(route.model.name).set(bool(self.fault(route)))

    def prepare_parsers(self) -> None:
        """Begins to look up the parsers of models that have a tokenizer, so that no request waits until SGLang is
        imported. To be called when tokenizers have changed."""
        for route in self.routes.all():
            tokenizer = self._tokenizers.loaded(route.model.path, route.model.generation)
            if tokenizer is not None and not route.model.HasField("embedding"):
                self._parsers.prepare(tokenizer, route.model.reasoning_parser, route.model.tool_parser)

    def resolve(self, request: Request) -> Request:
        """The request with its model's own name where it has an alias: from here on only that is used, in answers, in
        counts and by groups."""
        name = self.routes.name(request.model)
        return request if name == request.model else replace(request, model=name, alias=request.model)

    def route(self, asked: str, caller: Caller) -> Route:
        """The route of the model of this name or alias. Raises UnknownModel also if the caller may not use it;
        Unavailable as long as no routes were received at all."""
        name = self.routes.name(asked)
        caller.check_model(name, asked if asked != name else "")
        return self.routes.get(name)

    def known(self, asked: str, caller: Caller) -> str:
        """The own name of a model that exists and that the caller may use by this name or alias; else empty."""
        name = self.routes.name(asked)
        return name if caller.may_use(name, asked if asked != name else "") and self.routes.has(name) else ""

    def wakes(self, model: str) -> bool:
        """Whether a request for the model waits for it to come up: no group has it up, by the last routes."""
        if not self.routes.has(model):
            return False
        route = self.routes.get(model)
        return not route.faulty and not any(place.active for place in route.places)

    async def tokenizer(self, route: Route) -> Tokenizer:
        """The tokenizer of the route's model. Raises ModelFaulty if the model's folder has none that works."""
        try:
            return await self._tokenizers.get(route.model.path, route.model.generation)
        except Unmet as error:
            raise ModelFaulty(f"model '{route.model.name}': {error}") from None

    async def encode(
        self,
        tokenizer: Tokenizer,
        prompt: Prompt,
        field: str,
        characters: int,
        most: int | None = None,
        *,
        aside: bool = False,
    ) -> Sequence[int]:
        """A prompt's token ids; a text that is plainly longer than `most` tokens is not encoded. `characters`: number
        in all prompts of the request. `aside`: no answer waits for the ids. Raises BadField that names `field`; with
        `aside` also TooMany."""
        run = self._tokenizers.run_aside if aside else self._tokenizers.run
        try:
            if prompt.tokens is not None:
                return prompt.tokens
            if prompt.pair is not None:
                return await run(characters, tokenizer.encode_pair, prompt.pair.query, prompt.pair.document)
            if prompt.messages is not None:
                return await run(characters, tokenizer.chat, prompt.messages, prompt.template_options, most)
            text = prompt.text or ""
            return await run(characters, tokenizer.encode, text, prompt.special, most)
        except TooLong as error:
            text = f"The prompt has {error}; the model's context is {most}."
            raise BadField(text, field, "context_length_exceeded") from None
        except WrongMessage as error:
            raise BadField(str(error), f"{field}{error.place}") from None
        except Invalid as error:
            raise BadField(str(error), field) from None

    async def text(self, route: Route, ids: Sequence[int], *, aside: bool = False) -> str:
        """The text of `ids`, special tokens shown. Raises ModelFaulty; with `aside` also TooMany."""
        tokenizer = await self.tokenizer(route)
        run = self._tokenizers.run_aside if aside else self._tokenizers.run
        return await run(4 * len(ids), tokenizer.decode, ids)

    async def pieces(self, tokenizer: Tokenizer, ids: Sequence[int]) -> list[str]:
        """Each token as the vocabulary writes it; empty for an id that is not in it. Raises TooMany."""

        def find() -> list[str]:
            return [tokenizer.piece(one) or "" for one in ids]

        return await self._tokenizers.run_aside(4 * len(ids), find)

    async def offsets(
        self, tokenizer: Tokenizer, prompts: Sequence[Sequence[int]], texts: Sequence[str]
    ) -> list[list[int]]:
        """For each prompt, the characters of its text before each of its tokens."""

        def find() -> list[list[int]]:
            return [echo.offsets(tokenizer, ids, text) for ids, text in zip(prompts, texts, strict=True)]

        return await self._tokenizers.run(4 * sum(map(len, prompts)), find)

    async def drain(self) -> None:
        """Takes no more requests; returns once nothing is in flight."""
        self._draining = True
        await self._idle.wait()

    def cut(self) -> None:
        """Ends what is still in flight, and refuses what still comes, with an error that says why."""
        self._draining = True
        self._relay.cut(Unavailable("this gateway is stopping"))

    def _take(self, count: int, caller: Caller) -> None:
        """Counts `count` answers in. Raises TooMany."""
        if self._in_flight + count > self._most_in_flight:
            raise TooMany(
                f"{counted(self._in_flight, 'answer')} {agreeing(self._in_flight, 'is', 'are')} in flight and "
                f"{count} more {agreeing(count, 'was', 'were')} asked for; at most {self._most_in_flight} "
                f"{agreeing(self._most_in_flight, 'is', 'are')} taken"
            )
        caller.take_in_flight(count)
        self._count(count)

    def _count(self, change: int) -> None:
        self._in_flight += change
        metrics.IN_FLIGHT.set(self._in_flight)
        if self._in_flight:
            self._idle.clear()
        else:
            self._idle.set()

    def ended(self, count: int, caller: Caller) -> None:
        """Counts `count` of this caller's answers out."""
        caller.leave_in_flight(count)
        self._count(-count)

    def _jobs(
        self, request: Request, route: Route, index: int, ids: Sequence[int], ends: Sequence[int], span: Span
    ) -> list[AnswerJob]:
        """The jobs of one prompt, checked against its model. `ends`: further token ids that end an answer, as in
        SGLang's own server, whose scheduler knows the tokenizer; engines here know config.json. Raises BadField."""
        model = route.model
        room = _room(request, model, ids, request.field_of(index))
        for field in ("stop_token_ids", "label_token_ids"):
            unknown = [id for id in getattr(request.sampling, field) if id < 0 or id >= model.vocab_size > 0]
            if unknown:
                # An engine would use this id's place in a row of logits.
                raise BadField(f"Token id {unknown[0]} is not in the model's vocabulary.", field)
        asked = request.sampling
        if self._models_defaults:
            asked = sampling_defaults.filled(asked, request.left_open, model)
        limit = asked.max_new_tokens
        if limit > room and request.limit_given and not self._cut_to_context:
            raise BadField(
                f"'{request.limit_field}' is {limit}, but the prompt has {counted(len(ids), 'token')} and the model's "
                f"context {model.context_tokens}: at most {room} {agreeing(room, 'is', 'are')} left.",
                request.limit_field,
                "context_length_exceeded",
            )
        slo = common_pb2.Slo(
            ttft_ms=request.slo.ttft_ms or model.default_slo.ttft_ms,
            tpot_ms=request.slo.tpot_ms or model.default_slo.tpot_ms,
            drop_late=request.slo.drop_late or model.default_slo.drop_late,
        )
        if request.slo.best_effort:
            slo = common_pb2.Slo()
        several = len(request.prompts) * request.choices > 1
        jobs = []
        for number in range(request.choices):
            sampling = common_pb2.Sampling()
            sampling.CopyFrom(asked)
            sampling.max_new_tokens = 1 if request.embeds or asked.prompt_only else min(limit or room, room)
            if len(ids) == 1:  # nothing comes before it
                sampling.ClearField("prompt_logprobs_from")
            sampling.stop_token_ids.extend(
                end
                for end in ends
                if end not in asked.stop_token_ids and (not model.vocab_size or end < model.vocab_size)
            )
            if sampling.HasField("seed"):
                sampling.seed = _wrap(sampling.seed + number)  # one seed must not make all choices alike
            name = f"{request.request_id}.{index * request.choices + number}" if several else request.request_id
            about = (request.arrival_s, request.embeds, span, request.grammar_field or "tools")
            jobs.append(AnswerJob(name, request.model, ids, sampling, slo, *about))
        return jobs


def _reasons(request: Request) -> bool:
    """Whether it matters for the answers that the model reasons."""
    return request.separates or (request.thinks and request.sampling.WhichOneof("grammar") is not None)


def _hold_to(tools: Tools, sampling: common_pb2.Sampling, wanted: Wanted) -> None:
    """Sets the grammar of an answer that may call tools, where that depends on how the model writes its calls. Raises
    BadField."""
    form = calls.FORMATS.get(wanted.tools)
    if tools.answer is not None:
        if form is None:
            raise BadField("'response_format' beside 'tools' is not supported for this model.", "response_format")
        sampling.ebnf = tools_grammar.of(tools, form)
    elif not tools.must and tools.strict and form is not None and form.mark:
        sampling.structural_tag = tools_grammar.of_strict_calls(tools, form)


def _think_first(job: AnswerJob, wanted: Wanted, tokenizer: Tokenizer) -> None:
    """Lets the model reason before its answer has to follow a grammar."""
    if job.sampling.WhichOneof("grammar") is None:
        return
    where = reasoning_state(wanted, tokenizer, job.token_ids)
    begun = where is ReasoningState.BEGUN
    if where is not ReasoningState.OVER and wanted.answer and (begun or wanted.begin):
        structural_tags.after_reasoning(job.sampling, wanted.begin, wanted.answer, begun=begun)


def _room(request: Request, model: common_pb2.ModelSpec, ids: Sequence[int], field: str) -> int:
    """Number of tokens that the context leaves for an answer to `ids`, which came from `field`. Raises BadField if
    there are none, or `ids` is no prompt."""
    if not ids:
        raise BadField("The prompt has no tokens.", field)
    if model.vocab_size and max(ids) >= model.vocab_size:
        raise BadField(f"Token id {max(ids)} is not in the model's vocabulary of {model.vocab_size}.", field)
    room = model.context_tokens - len(ids)
    alone = request.embeds or request.sampling.prompt_only
    if room < (0 if alone else 1):
        answer = "" if alone else ", of which one must be left for the answer"
        raise BadField(
            f"The prompt has {counted(len(ids), 'token')}; the model's context is {model.context_tokens}{answer}.",
            field,
            "context_length_exceeded",
        )
    return room


def _wrap(number: int) -> int:
    """The number wrapped into a signed 64-bit integer."""
    return (number + (1 << 63)) % (1 << 64) - (1 << 63)
