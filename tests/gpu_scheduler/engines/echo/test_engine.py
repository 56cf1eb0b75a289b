"""The echo engine's loop, step by step, with memory that is counted."""

import time

from gpu_scheduler.engines.echo.engine import EchoEngine
from protos import common_pb2, engine_pb2


class Channel:
    def __init__(self):
        self.finished = []

    def send(self, message):
        chunks = message.tokens.chunks if message.WhichOneof("message") == "tokens" else ()
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


def test_what_runs_goes_on_while_a_prompt_finds_no_memory():
    channel = Channel()
    engine = EchoEngine(channel, None, 1)
    engine._memory, engine._step_s = Memory(10), 0.0
    for name in ("first", "second"):
        sampling = common_pb2.Sampling(max_new_tokens=4, ignore_eos=True)
        engine._accept(engine_pb2.Generate(request_id=name, token_ids=[1] * 6, sampling=sampling))
    for _ in range(20):
        engine._step(time.monotonic())
    assert channel.finished == ["first", "second"]


def test_a_grammar_is_refused():
    channel = Channel()
    engine = EchoEngine(channel, None, 1)
    engine._memory = Memory(10)
    sampling = common_pb2.Sampling(max_new_tokens=4, regex="a")
    engine._accept(engine_pb2.Generate(request_id="first", token_ids=[1], sampling=sampling))
    assert channel.finished == ["first"] and not engine._waiting
