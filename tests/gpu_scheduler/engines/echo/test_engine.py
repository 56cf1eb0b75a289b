"""The echo engine's loop, step by step, with memory that is counted."""

import time

import pytest

from gpu_scheduler.engines.echo.engine import EchoEngine
from gpu_scheduler.engines.echo.rule import embedding
from protos import common_pb2, engine_pb2


class Channel:
    def __init__(self):
        self.finished, self.last, self.chunks = [], None, []

    def send(self, message):
        chunks = message.tokens.chunks if message.WhichOneof("message") == "tokens" else ()
        self.last = chunks[-1] if chunks else self.last
        self.chunks += chunks
        self.finished += [chunk.request_id for chunk in chunks if chunk.finish]


class Memory:
    """Of so many tokens for all requests together."""

    context_tokens = 100
    wake_fd = None

    def __init__(self, tokens):
        self._tokens = tokens
        self._held = {}

    def fit(self, request_id, tokens):
        others = sum(held for name, held in self._held.items() if name != request_id)
        fits = others + tokens <= self._tokens
        if fits:
            self._held[request_id] = tokens
        return fits

    def free(self, request_id):
        self._held.pop(request_id, None)

    def describe(self, stats): ...


def test_running_request_goes_on_while_a_prompt_finds_no_memory():
    channel = Channel()
    engine = EchoEngine(channel)
    engine._memory, engine._step_s = Memory(10), 0.0
    for name in ("first", "second"):
        sampling = common_pb2.Sampling(max_new_tokens=4, ignore_eos=True)
        engine._accept(engine_pb2.Generate(request_id=name, token_ids=[1] * 6, sampling=sampling))
    for _ in range(20):
        engine._step(time.monotonic())
    assert channel.finished == ["first", "second"]


def test_echo_engine_refuses_a_request_with_a_grammar():
    channel = Channel()
    engine = EchoEngine(channel)
    engine._memory = Memory(10)
    sampling = common_pb2.Sampling(max_new_tokens=4, regex="a")
    engine._accept(engine_pb2.Generate(request_id="first", token_ids=[1], sampling=sampling))
    assert channel.finished == ["first"] and not engine._waiting


def test_a_prompt_is_embedded_in_one_step_and_keeps_no_memory():
    channel = Channel()
    engine = EchoEngine(channel)
    engine._memory, engine._dimensions = Memory(10), 4
    for name in ("first", "second"):  # each fills the memory
        engine._accept(engine_pb2.Generate(request_id=name, token_ids=range(10), embed=True))
    for _ in range(2):
        engine._step(time.monotonic())
    assert channel.finished == ["first", "second"] and not engine._memory._held
    assert list(channel.last.embedding) == pytest.approx(embedding(range(10), 4))
    assert (channel.last.finish, channel.last.prompt_tokens) == (common_pb2.STOP, 10)


@pytest.mark.parametrize("dimensions", [0, 4])
def test_embedding_from_a_text_model_and_text_from_an_embedding_model_are_refused(dimensions):
    channel = Channel()
    engine = EchoEngine(channel)
    engine._memory, engine._dimensions = Memory(10), dimensions
    engine._accept(engine_pb2.Generate(request_id="first", token_ids=[1], embed=not dimensions))
    assert channel.last.finish == common_pb2.REJECTED and not engine._waiting


def test_prompt_logprobs_are_as_many_as_asked_for_also_where_nothing_is_generated():
    channel = Channel()
    engine = EchoEngine(channel)
    engine._memory = Memory(100)
    sampling = common_pb2.Sampling(max_new_tokens=1, logprobs=True, prompt_logprobs_from=1, prompt_only=True)
    engine._accept(engine_pb2.Generate(request_id="alone", token_ids=range(5), sampling=sampling))
    sampling.prompt_logprobs_from, sampling.prompt_only = 4, False
    engine._accept(engine_pb2.Generate(request_id="answered", token_ids=range(5), sampling=sampling))
    engine._step(time.monotonic())
    told = {name: [chunk for chunk in channel.chunks if chunk.request_id == name] for name in ("alone", "answered")}
    assert [len(chunk.prompt_logprobs) for chunk in told["alone"]] == [4, 0]
    assert [len(chunk.prompt_logprobs) for chunk in told["answered"]] == [1, 0]
    assert [list(chunk.token_ids) for chunk in told["alone"]] == [[], []] and told["answered"][1].token_ids
    assert channel.finished == ["alone", "answered"] and not engine._memory._held
