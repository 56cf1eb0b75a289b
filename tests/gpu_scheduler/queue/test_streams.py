"""What waits for a gateway that reads slowly."""

import asyncio

from gpu_scheduler.queue.streams import MOST_SCORED, GatewayStream, PulledStream
from protos import common_pb2
from services.ipc.framing import MAX_BYTES
from testing.patience import PATIENCE_S

BEST = [common_pb2.TopLogprob(token_id=200_000, logprob=-12.5)] * 20
SCORES = [common_pb2.TokenLogprob(logprob=-1.5, top=BEST)] * 256


def scored(number):
    return common_pb2.TokenChunk(request_id=str(number), prompt_logprobs=SCORES)


def test_log_probabilities_of_many_prompts_share_messages_that_every_transport_takes():
    ready = []
    stream = GatewayStream(1, lambda: ready.append(True))
    pushed = [scored(number) if number % 3 else common_pb2.TokenChunk(request_id=str(number)) for number in range(100)]
    for chunk in pushed:
        stream.push(chunk)
    assert sum(chunk.ByteSize() for chunk in pushed) > 2 * MOST_SCORED * 200
    taken = []
    while ready:
        ready.pop()
        message = stream.take()
        assert message is not None and message.ByteSize() < MAX_BYTES / 50
        taken += message.chunks
    assert taken == pushed and stream.take() is None


async def test_pulled_stream_delivers_all_chunks_without_another_push():
    stream = PulledStream(1)
    for number in range(40):
        stream.push(scored(number))
    names = []
    async with asyncio.timeout(PATIENCE_S):
        async for message in stream.messages():
            names += [chunk.request_id for chunk in message.chunks]
            if len(names) == 40:
                break
    assert names == [str(number) for number in range(40)]
