"""sglang.Engine as its users start it, with our socket where they have their HTTP server.

Imports SGLang: for the reference's own process.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
from typing import Any

import sglang

from benchmarks.gpu import stock_model
from protos import common_pb2, engine_pb2
from services.ipc.framing import FramedChannel
from services.runtime import tasks

_OURS = (
    "enable_priority_scheduling",
    "schedule_low_priority_values_first",
    "disable_priority_preemption",
    "watchdog_timeout",
    "model_loader_extra_config",
)
"""Arguments that only our engine has a use for."""


class Front:
    """Requests from the socket to SGLang's tokenizer manager, and back as they stream."""

    def __init__(self, engine: sglang.Engine, channel: FramedChannel[engine_pb2.ToEngine]) -> None:
        self._engine = engine
        self._channel = channel

    async def serve(self) -> None:
        while (message := await self._channel.recv()) is not None:
            kind = message.WhichOneof("message")
            if kind == "generate":
                tasks.spawn(self._answer(message.generate), message.generate.request_id)
            elif kind == "abort":
                self._engine.tokenizer_manager.abort_request(message.abort.request_id)
            else:
                return

    async def _answer(self, generate: engine_pb2.Generate) -> None:
        asked = generate.sampling
        stream = await self._engine.async_generate(
            input_ids=list(generate.token_ids),
            sampling_params={
                "max_new_tokens": asked.max_new_tokens,
                "temperature": asked.temperature,
                "ignore_eos": asked.ignore_eos,
            },
            return_logprob=asked.logprobs,
            top_logprobs_num=asked.top_logprobs,
            stream=True,
            rid=generate.request_id,
        )
        first = True
        async for part in stream:
            about = part["meta_info"]
            chunk = common_pb2.TokenChunk(request_id=generate.request_id, token_ids=part["output_ids"])
            if first:
                chunk.prompt_tokens, chunk.cached_tokens = len(generate.token_ids), about["cached_tokens"]
                first = False
            if asked.logprobs:
                _add_logprobs(chunk, about)
            if about["finish_reason"] is not None:
                kind = about["finish_reason"]["type"]
                ends = {"length": common_pb2.LENGTH, "stop": common_pb2.STOP, "abort": common_pb2.ABORTED}
                chunk.finish = ends.get(kind, common_pb2.FAILED)
            self._channel.send(engine_pb2.FromEngine(tokens=engine_pb2.Tokens(chunks=[chunk])))


def _add_logprobs(chunk: common_pb2.TokenChunk, about: dict[str, list[Any]]) -> None:
    best = about.get("output_top_logprobs") or [()] * len(chunk.token_ids)
    for (value, *_), top in zip(about["output_token_logprobs"], best, strict=True):
        one = chunk.logprobs.add(logprob=value)
        for top_value, token, *_ in top or ():
            one.top.add(token_id=token, logprob=top_value)


async def _serve(channel_fd: int) -> None:
    channel = await FramedChannel(engine_pb2.ToEngine).open(socket.socket(fileno=channel_fd))
    hello = engine_pb2.Hello(pid=os.getpid(), engine="stock", version=sglang.__version__)
    channel.send(engine_pb2.FromEngine(hello=hello))
    message = await channel.recv()
    if message is None:
        return
    named = stock_model.sglang_arguments(message.load)
    for name in _OURS:
        del named[name]
    named["base_gpu_id"] = int(message.load.device.partition(":")[2] or 0)
    engine = sglang.Engine(**{**named, "log_level": "error"}, incremental_streaming_output=True)
    about = engine._scheduler_init_result.scheduler_infos[0]
    stock_model.check_pool(named["max_total_tokens"], about["max_total_num_tokens"])
    done = engine_pb2.Done(command_id=message.load.command_id)
    channel.send(engine_pb2.FromEngine(done=done))
    try:
        await Front(engine, channel).serve()
    finally:
        # SGLang's own shutdown takes seconds; its processes die with this one.
        os.kill(os.getpid(), signal.SIGKILL)


def run(channel_fd: int) -> None:
    asyncio.run(_serve(channel_fd))
