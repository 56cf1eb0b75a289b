"""Encoders in a real engine on a real GPU: vectors and ranks are those of Transformers in float32, in both types of 16
bits, the second time too, in little memory, asleep and awake, and beside a decoder in the same process. So are the
vectors of a decoder, and the probabilities by which one ranks.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from balloond.client import BalloondClient
from protos import common_pb2, engine_pb2
from testing.engines import harness
from testing.engines.harness import EngineEnd
from testing.engines.images import Image
from testing.systems.local import FOLDER
from tests.balloond.conftest import Node
from tests.gpu.conftest import DEVICE, MIB
from tests.gpu.test_engine import EXTENT, make_prompts
from tests.gpu.test_engine import MODEL as DECODER
from tests.gpu_scheduler.engines.sglang import checkpoints
from tests.gpu_scheduler.engines.sglang.classes.test_encoder import (
    PACKAGE,
    PROMPTS,
    logits_of,
    minilm,
    random_roberta,
    vectors_of,
)

MODEL = "encoder"
CONTEXT = 512
WEIGHTS = 192 * MIB
FLOOR = 8 * EXTENT
"""KV of one prompt of the context takes 4.5 MiB with MiniLM's shape."""
PATIENT = {"park_after_ms": 10_000, "hard_wait_ms": 10_000}
TYPES = {"float16": (0.9999, 0.02), "bfloat16": (0.998, 0.15)}
"""By the type of the weights: the least cosine, and the most that a rank differs. On a CPU Transformers' own are within
0.99998 and 0.003, 0.9998 and 0.02 of those in float32; other prompts of the same model, 0.993."""
ROBERTA = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 4, "initializer_range": 0.1}
"""Heads of 64, as published ones have; states that rounding does not change much."""


def random_bert(folder: Path) -> Path:
    """Of MiniLM's shape."""
    from transformers import BertConfig, BertModel

    torch.manual_seed(5)
    config = BertConfig(
        hidden_size=384, intermediate_size=1536, num_hidden_layers=6, num_attention_heads=12, initializer_range=0.1
    )
    BertModel(config).save_pretrained(folder)
    return folder


def of_type(folder: Path, dtype: str, copy: Path) -> Path:
    """The same files, which say that they are of `dtype`: engines compute with that."""
    copy.mkdir(exist_ok=True)
    for each in folder.iterdir():
        if each.is_file() and not (copy / each.name).exists():
            (copy / each.name).symlink_to(each.resolve())
    config = json.loads((folder / "config.json").read_text())
    config.pop("torch_dtype", None)
    (copy / "config.json").unlink()
    (copy / "config.json").write_text(json.dumps({**config, "dtype": dtype}))
    return copy


async def right(
    end: EngineEnd,
    tag: str,
    expected: torch.Tensor,
    least: float,
    prompts: Sequence[Sequence[int]] = PROMPTS,
    encodes: bool = True,
) -> None:
    """All prompts at once, twice: SGLang's own server finds prefixes of an encoder's the second time, and its vectors
    are wrong."""
    for time in range(2):
        for number, prompt in enumerate(prompts):
            end.embed(f"{tag}-{time}-{number}", prompt)
        for number in range(len(prompts)):
            answer = await end.answer(f"{tag}-{time}-{number}")
            assert (answer.finish, answer.error) == (common_pb2.STOP, ""), (tag, time, number)
            assert not (encodes and answer.cached_tokens), (tag, time, number)
            vector = torch.tensor(answer.embedding)
            assert float(vector.norm()) == pytest.approx(1.0, abs=1e-2)
            near = float(torch.nn.functional.normalize(vector, dim=0) @ expected[number])
            assert near > least, (tag, time, number, near)


def load_of(at: harness.Node, path: Path, pooling: str, dimensions: int) -> engine_pb2.Load:
    """`pooling`: of an encoder; a decoder has none."""
    load = harness.load(
        at, MODEL, path, context_tokens=CONTEXT, embedding=dimensions, max_running_requests=16, **PATIENT
    )
    load.kv_extent_bytes = EXTENT
    load.model.embedding.pooling = pooling
    return load


async def sleeps_and_wakes(end: EngineEnd, node: Node, mapped: engine_pb2.WeightsMapped) -> None:
    image = Image(node.handoff, DEVICE, mapped.weights_bytes)
    await image.take(mapped.lease_id)
    await image.tidied()
    await end.do(hibernate=engine_pb2.Hibernate())
    await node.until(lambda device: device.leased_bytes == 0)
    end.send(wake=engine_pb2.Wake())
    awake = (await end.hear("weights_mapped")).weights_mapped
    await image.put(awake.lease_id)
    await end.do(verify=engine_pb2.Verify(command_id=awake.command_id))
    await image.close()


async def generates(end: EngineEnd, at: harness.Node, tag: str) -> None:
    """A decoder in the same process, with CUDA graphs, whose next token also ranks."""
    load = harness.load(at, MODEL, FOLDER / DECODER, context_tokens=CONTEXT, max_running_requests=8, **PATIENT)
    load.kv_extent_bytes = EXTENT
    await end.hold(load)
    for number in range(4):
        end.ask(f"text, {tag}-{number}", [5 + number] * 40, 12, ignore_eos=True)
    for number in range(4):
        answer = await end.answer(f"text, {tag}-{number}")
        assert (answer.finish, answer.error, len(answer.tokens)) == (common_pb2.LENGTH, "", 12)
    prompts = make_prompts(4, 200, seed=9)
    rows = checkpoints.logprobs(FOLDER / DECODER, [[*prompt, 5] for prompt in prompts])
    likely = [of_text[-1].topk(2) for of_text in rows]
    for number, prompt in enumerate(prompts):
        labels = likely[number].indices.tolist()
        end.ask(f"label, {tag}-{number}", prompt, 1, prompt_only=True, label_token_ids=labels)
    for number, best in enumerate(likely):
        told = (await end.answer(f"label, {tag}-{number}")).label_logprobs
        assert told == pytest.approx(best.values.tolist(), abs=0.5), number  # bfloat16: 0.27 on a CPU
    await end.do(unload=engine_pb2.Unload())


async def test_encoders_make_transformers_vectors_and_ranks_in_both_types_twice_and_awake(
    node: Node, tmp_path: Path
) -> None:
    """One engine for all: those that are wrong are told together."""
    bert = random_bert(tmp_path / "bert") if PACKAGE is None else minilm()
    roberta = random_roberta(tmp_path / "roberta", **ROBERTA)
    ranker = random_roberta(tmp_path / "ranker", ranks=True, **ROBERTA)
    decoder = checkpoints.embedder(tmp_path / "decoder")
    texts = make_prompts(4, 200, seed=8, vocabulary=checkpoints.VOCABULARY)
    vectors = {path: vectors_of(path) for path in (bert, roberta)}
    vectors[decoder] = {"": torch.tensor(checkpoints.embeddings(decoder, texts))}
    ranks = logits_of(ranker)
    wrong: dict[str, str] = {}
    await node.book(MODEL, weights=WEIGHTS, floor=2 * FLOOR)
    async with harness.engine() as end:
        at = harness.Node(BalloondClient(node.address), node.handoff, DEVICE)

        async def held(what: str, path: Path, pooling: str, dtype: str) -> None:
            least, most = TYPES[dtype]
            folder = of_type(path, dtype, tmp_path / f"{path.name}-{dtype}")
            hidden = config_of(path)["hidden_size"]
            mapped, measured = await end.hold(load_of(at, folder, pooling, 1 if pooling == "pair" else hidden))
            assert measured.graph_bytes == 0
            if pooling == "pair":
                for number, logit in enumerate(ranks):
                    end.embed(f"{what}-{number}", PROMPTS[number])
                    answer = await end.answer(f"{what}-{number}")
                    assert answer.embedding == pytest.approx([logit], abs=most), (what, number)
                return
            expected = vectors[path][pooling]
            if not pooling:
                await right(end, what, expected, least, texts, encodes=False)
                return
            await right(end, what, expected, least)
            if what != "bert by mean, float16":
                return
            await at.limit(MODEL, 2 * FLOOR)
            await right(end, f"{what}, in little memory", expected, least)
            await at.limit(MODEL, 64 * EXTENT)
            await sleeps_and_wakes(end, node, mapped)
            await right(end, f"{what}, awake", expected, least)

        for dtype in TYPES:
            for name, path, pooling in (
                ("bert", bert, "mean"),
                ("bert", bert, "cls"),
                ("roberta", roberta, "mean"),
                ("roberta", roberta, "cls"),
                ("ranker", ranker, "pair"),
                ("decoder", decoder, ""),
            ):
                what = f"{name} by {pooling}, {dtype}"
                try:
                    await held(what, path, pooling, dtype)
                except AssertionError as error:
                    wrong[what] = " ".join(str(error).split())[:300]
                end.send(unload=engine_pb2.Unload())
                await end.hear("done", "failed")
            await generates(end, at, dtype)
        await at.client.close()
    assert not wrong


def config_of(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((path / "config.json").read_text())
    return found
