"""Prompts that come back with their answers: text, tokens, log-probabilities and places."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.text.echo import Echo, offsets
from protos import common_pb2
from tests.gateway import fakes
from tests.gateway.conftest import World
from tests.gateway.fakes import Running
from tests.gateway.openai.test_completions import events
from tests.gateway.test_app import refusal
from tests.gateway.test_grpc_api import ask, generate
from tests.gateway.text.test_detokenizer import KINDS, _size, _tokenizer
from tokenization.tokenizer import Tokenizer

TEXTS = st.one_of(
    st.text(alphabet=st.characters(exclude_categories=["Cs"])),
    st.lists(st.sampled_from(["hello", " world", "héllo", "世界", "😀", "\n", "  ", "<|user|>", "[added]"])).map(
        "".join
    ),
)


def _whole(tokenizer: Tokenizer, ids: list[int]) -> str:
    """Of what is written by `ids`, all whole characters."""
    return b"".join(map(tokenizer.token_bytes, ids)).decode(errors="ignore")


@settings(max_examples=300)
@given(text=TEXTS)
def test_token_offsets_are_where_their_text_begins(text: str) -> None:
    tokenizer = _tokenizer("byte level")
    ids = tokenizer.encode(text, special=True)
    assert ids[0] in tokenizer.special_ids, "one that is not in the text"
    assert offsets(tokenizer, ids, text) == [0, *(len(_whole(tokenizer, ids[1:end])) for end in range(1, len(ids)))]


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=300)
@given(data=st.data())
def test_token_offsets_never_decrease_in_any_text(kind: str, data: st.DataObject) -> None:
    """Also of tokens that no text is made of."""
    tokenizer = _tokenizer(kind)
    ids = data.draw(st.lists(st.integers(0, _size(kind) + 3), min_size=1))
    text = data.draw(st.one_of(st.just(tokenizer.decode(ids)), TEXTS))
    places = offsets(tokenizer, ids, text)
    assert len(places) == len(ids) and places[0] == 0
    assert places == sorted(places) and places[-1] <= len(text)


def test_token_offsets_skip_a_leading_space_dropped_by_the_tokenizer() -> None:
    tokenizer = _tokenizer("sentence piece")
    text = "hello world"
    ids = tokenizer.encode(text, special=False)
    assert tokenizer.token_bytes(ids[0]).startswith(b" ")
    assert text[offsets(tokenizer, ids, text)[-1] :] == tokenizer.token_bytes(ids[-1]).decode()


@given(cuts=st.lists(st.integers(0, 6)))
def test_echo_log_probabilities_are_sent_once_and_in_order_however_they_arrive(cuts: list[int]) -> None:
    ids, places, text = [5, 6, 7, 8, 9], [0, 1, 1, 4, 6], "abcdefgh"
    scores = [common_pb2.TokenLogprob(logprob=-token) for token in ids[1:]]
    echo = Echo(text, ids, places)
    told, scored = "", []
    for cut in [*cuts, len(scores)]:
        more, ones = echo.more(scores[:cut])
        assert len(told) + len(more) == (places[len(scored) + len(ones)] if len(scored + ones) < 5 else len(text))
        del scores[:cut]
        told += more
        scored += ones
    assert told == text
    assert [(one.token, one.logprob, one.offset) for one in scored] == [
        (token, None if token == 5 else -token, place) for token, place in zip(ids, places, strict=True)
    ]


def test_echo_of_text_without_scores_is_sent_at_once() -> None:
    echo = Echo("abc")
    assert [echo.more([]), echo.more([])] == [("abc", []), ("", [])]
    assert Echo().more([]) == ("", [])


def score(token: int) -> common_pb2.TokenLogprob:
    """Any of its own for each token; the best one is it, or another for each third."""
    own = -token / 4
    top = [(token, own)] if token % 3 else [(token + 1, own + 1), (token, own)]
    best = [common_pb2.TopLogprob(token_id=one, logprob=value) for one, value in top]
    return common_pb2.TokenLogprob(logprob=own, top=best)


def scores_of(running: Running) -> list[common_pb2.TokenLogprob]:
    """Of its prompt, those that are asked for."""
    sampling = running.submit.sampling
    if not sampling.HasField("prompt_logprobs_from"):
        return []
    return [score(token) for token in running.submit.token_ids[sampling.prompt_logprobs_from :]]


def scored(world: World, text: str, together: int = 2) -> fakes.Script:
    """Tells the prompt's log-probabilities, so many at a time, and then says `text`."""
    ids = world.ids(text)

    async def script(running: Running) -> None:
        told, sampling = scores_of(running), running.submit.sampling
        for begin in range(0, len(told), together):
            running.tokens([], prompt_logprobs=told[begin : begin + together])
        rest = [] if sampling.prompt_only else ids[running.submit.resumed_tokens :][: sampling.max_new_tokens]
        for token in rest:
            running.tokens([token], logprobs=[score(token)] if sampling.logprobs else [])
        running.finish(common_pb2.LENGTH)

    return script


def joined(response: Any, stream: bool) -> list[dict[str, Any]]:
    """The choices, those of a stream put together."""
    if not stream:
        return list(response.json()["choices"])
    choices: dict[int, dict[str, Any]] = {}
    for event in events(response):
        for part in event["choices"]:
            choice = choices.setdefault(part["index"], {"text": "", "logprobs": {}})
            choice["text"] += part["text"]
            choice["finish_reason"] = part["finish_reason"]
            for name, values in (part["logprobs"] or {}).items():
                choice["logprobs"].setdefault(name, []).extend(values)
    return [choices[index] for index in sorted(choices)]


def loglikelihood(choice: dict[str, Any], context: int) -> tuple[float, bool]:
    """As lm-evaluation-harness reads it: of the tokens behind the context, without the last, which is the answer's;
    and whether each of them is the most likely one."""
    own = choice["logprobs"]["token_logprobs"][context:-1]
    best = choice["logprobs"]["top_logprobs"][context:-1]
    return sum(own), all(one == max(top.values()) for one, top in zip(own, best, strict=True))


ASKED = {"temperature": 0, "logprobs": 1, "echo": True, "seed": 1234}


@pytest.mark.parametrize("stream", [False, True])
async def test_echo_gives_the_log_likelihoods_that_an_evaluation_harness_reads(world: World, stream: bool) -> None:
    world.groups[0].script = scored(world, " fox jumps")
    prompts = [world.ids("the quick brown fox"), world.ids("héllo 世界")]
    response = await world.complete(prompt=prompts, max_tokens=1, stream=stream, **ASKED)
    for prompt, choice in zip(prompts, joined(response, stream), strict=True):
        assert len(choice["logprobs"]["token_logprobs"]) == len(prompt) + 1
        for context in range(1, len(prompt)):
            rest = prompt[context:]
            right = sum(score(token).logprob for token in rest), all(token % 3 for token in rest)
            assert loglikelihood(choice, context) == pytest.approx(right)
    asked = world.groups[0].requests[0].submit.sampling
    assert (asked.prompt_logprobs_from, asked.logprobs, asked.top_logprobs, asked.max_new_tokens) == (1, True, 1, 1)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("max_tokens", [0, 1, 3])
async def test_echo_has_the_prompt_with_its_tokens_before_the_answer(
    world: World, stream: bool, max_tokens: int
) -> None:
    world.groups[0].script = scored(world, " fox, 世")
    text = "<|user|>héllo 世界 😀"
    response = await world.complete(prompt=text, max_tokens=max_tokens, n=2, stream=stream, **ASKED)
    prompt = list(world.groups[0].requests[0].submit.token_ids)
    answer = world.ids(" fox, 世")[:max_tokens]
    for choice in joined(response, stream):
        told = choice["logprobs"]
        assert choice["text"] == text + b"".join(map(_bytes(world), answer)).decode()
        assert (choice["finish_reason"], len(told["tokens"])) == ("length", len(prompt) + max_tokens)
        assert told["token_logprobs"] == [None, *(score(token).logprob for token in [*prompt[1:], *answer])]
        assert told["top_logprobs"][0] is None and all(told["top_logprobs"][1:])
        # A BOS, and the special token in the text. Tokens of parts of a character have no text of their own.
        assert (told["tokens"][:2], told["text_offset"][:3]) == (["<s>", "<|user|>"], [0, 0, len("<|user|>")])
        for token, at in zip(told["tokens"][1:], told["text_offset"][1:], strict=True):
            assert "\ufffd" in token or choice["text"].startswith(token, at)
    if not stream:
        usage = response.json()["usage"]
        assert (usage["prompt_tokens"], usage["completion_tokens"]) == (len(prompt), 2 * max_tokens)


def _bytes(world: World) -> Any:
    from tokenization.loading import load

    return load(world.folder).token_bytes


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("asked", [{}, {"echo": True}, {"echo": True, "logprobs": 0}, {"logprobs": 2}])
async def test_completion_of_zero_tokens_is_answered(world: World, stream: bool, asked: dict[str, Any]) -> None:
    world.groups[0].script = scored(world, " fox")
    response = await world.complete(prompt="the quick", max_tokens=0, stream=stream, **asked)
    (choice,) = joined(response, stream)
    prompt = world.groups[0].requests[0].submit.token_ids
    echoes = bool(asked.get("echo"))
    assert (choice["text"], choice["finish_reason"]) == ("the quick" if echoes else "", "length")
    told = choice["logprobs"]
    if "logprobs" in asked and (echoes or not stream):
        assert len(told["tokens"]) == (len(prompt) if echoes else 0)
    else:
        assert not told
    assert world.groups[0].requests[0].submit.sampling.prompt_only
    if not stream:
        usage = {name: response.json()["usage"][name] for name in ("prompt_tokens", "completion_tokens")}
        assert usage == {"prompt_tokens": len(prompt), "completion_tokens": 0}


async def test_a_prompt_of_one_token_has_no_log_probability(world: World) -> None:
    world.groups[0].script = scored(world, " fox")
    (token,) = world.ids("a")
    response = await world.complete(prompt=[token], max_tokens=1, **ASKED)
    told = response.json()["choices"][0]["logprobs"]
    assert (told["token_logprobs"][0], told["top_logprobs"][0], len(told["tokens"])) == (None, None, 2)
    assert not world.groups[0].requests[0].submit.sampling.HasField("prompt_logprobs_from")


async def test_prompt_with_zero_tokens_to_generate_may_fill_the_context(world: World) -> None:
    world.groups[0].script = scored(world, " fox", together=256)
    full = [world.ids("a")[0]] * 512
    told = (await world.complete(prompt=full, max_tokens=0, **ASKED)).json()["choices"][0]["logprobs"]
    assert len(told["tokens"]) == 512
    assert refusal(await world.complete(prompt=full, max_tokens=1, **ASKED), 400)["code"] == "context_length_exceeded"
    assert refusal(await world.complete(prompt=[*full, 5], max_tokens=0), 400)["code"] == "context_length_exceeded"


async def test_log_probabilities_of_a_prompt_are_sent_once_across_a_failover(world: World) -> None:
    """Its engine dies while they come, and the next one when the answer has begun."""
    text, prompt = " fox jumps over", world.ids("the quick brown dog, hello")
    await world.publish(world.route(*map(fakes.place, world.groups)))
    submits: list[Running] = []

    async def script(running: Running) -> None:
        submits.append(running)
        told = scores_of(running)
        if len(submits) == 1:
            running.tokens([], prompt_logprobs=told[:3])
            running.finish(common_pb2.FAILED, "its engine died")
        elif len(submits) == 2:
            running.tokens([], prompt_logprobs=told)
            running.tokens(world.ids(text)[:1], logprobs=[score(token) for token in world.ids(text)[:1]])
            running.finish(common_pb2.FAILED, "its engine died")
        else:
            await scored(world, text)(running)

    for group in world.groups:
        group.script = script
    response = await world.complete(prompt=prompt, max_tokens=3, **ASKED)
    told = response.json()["choices"][0]["logprobs"]
    expected = [*prompt[1:], *world.ids(text)[:3]]
    assert told["token_logprobs"] == [None, *(score(token).logprob for token in expected)]
    asked = [running.submit.sampling for running in submits]
    assert [one.prompt_logprobs_from for one in asked] == [1, 4, 0]
    assert [one.HasField("prompt_logprobs_from") for one in asked] == [True, True, False]
    assert [one.max_new_tokens for one in asked] == [3, 3, 2]


async def test_group_of_an_older_version_without_prompt_log_probabilities_is_detected(world: World) -> None:
    """One of a version before steps over what is new to it: it says a token, and nothing of the prompt."""

    async def older(running: Running) -> None:
        running.tokens(world.ids("a"), logprobs=[score(5)] if running.submit.sampling.logprobs else [])
        running.finish(common_pb2.LENGTH)

    world.groups[0].script = older
    for max_tokens in (0, 1):
        error = refusal(await world.complete(max_tokens=max_tokens, **ASKED), 503)
        assert "no log-probabilities of the prompt" in str(error["message"])
    for asked in ({}, {"logprobs": 1}):
        answer = (await world.complete(max_tokens=0, **asked)).json()
        assert (answer["choices"][0]["text"], answer["usage"]["completion_tokens"]) == ("", 0)


async def test_echo_of_a_long_prompt_is_streamed_as_it_is_computed(world: World) -> None:
    release = asyncio.Event()

    async def script(running: Running) -> None:
        told = scores_of(running)
        running.tokens([], prompt_logprobs=told[:4])
        await release.wait()
        running.tokens([], prompt_logprobs=told[4:])
        running.finish(common_pb2.LENGTH)

    world.groups[0].script = script
    prompt = "the quick brown fox jumps over the lazy dog"
    body = {"model": "org/tiny", "prompt": prompt, "max_tokens": 0, "stream": True, **ASKED}
    text = ""
    async with world.http.stream("POST", "/v1/completions", json=body) as response:
        async for line in response.aiter_lines():
            if not line.startswith("data: {"):
                continue
            choice = json.loads(line.removeprefix("data: "))["choices"][0]
            if not text:
                assert len(choice["logprobs"]["tokens"]) == 5 and 0 < len(choice["text"]) < len(prompt)
                release.set()
            text += choice["text"]
    assert text == prompt


async def test_log_probabilities_beyond_the_bound_of_a_gateway_are_refused(world: World) -> None:
    prompt = [world.ids("a")[0]] * 500
    more = {"prompt": [prompt] * 4, "n": 128, "max_tokens": 0, "echo": True}
    error = refusal(await world.complete(**more, logprobs=20), 400)
    assert error["param"] == "echo" and f"{500 * 4 * 128 * 21} log-probabilities" in str(error["message"])
    assert not world.groups[0].requests


async def test_grpc_request_for_prompt_log_probabilities_is_refused(world: World) -> None:
    import grpc

    sampling = common_pb2.Sampling(logprobs=True, prompt_logprobs_from=1)
    with pytest.raises(grpc.aio.AioRpcError, match="prompt_logprobs_from"):
        await generate(world, ask(sampling=sampling))
    world.groups[0].script = scored(world, " fox")
    told = await generate(world, ask(sampling=common_pb2.Sampling(prompt_only=True)))
    assert (told[-1].finish, told[-1].completion_tokens) == (common_pb2.LENGTH, 0)
