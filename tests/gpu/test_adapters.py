"""Adapters (LoRA) in a real engine on a real GPU, with CUDA graphs and SGLang's own kernels for adapters: each token is
as likely as Transformers finds it with the adapter merged into the weights, whatever runs in the same batch, whatever
was cached before, and whatever happens to the memory.

Kernels are compiled when a machine first sees them: `PRISM_TEST_START_S=300` for that time.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import torch

from balloond.client import BalloondClient
from loader.checkpoints.architectures import classes
from protos import common_pb2, engine_pb2
from services.runtime import tasks
from testing import small_adapters, small_checkpoints
from testing.engines import harness
from testing.engines.harness import EngineEnd
from testing.engines.images import Image
from tests.balloond.conftest import Node
from tests.gpu.conftest import DEVICE, MIB
from tests.gpu.test_engine import EXTENT

MODEL = "base"
NAMES = ("", "a", "b")
"""Of adapters; the base has none."""
FLOOR = 4 * EXTENT
WEIGHTS = 128 * MIB
RANK = 8
NEW = 24
LONG = 200
"""Tokens of answers that run while memory is taken away."""
SHAPE = {
    "vocab_size": 1024,
    "hidden_size": 512,
    "intermediate_size": 1024,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "max_position_embeddings": 512,
    "initializer_range": 0.05,
    "tie_word_embeddings": False,
    "bos_token_id": 0,
    "eos_token_id": 1,
}
"""8 KiB of KV a token: 256 tokens an extent."""
OPTIONS = {"max_running_requests": 80, "reserve_low": 1, "reserve_high": 2}
PATIENT = {"park_after_ms": 10_000, "hard_wait_ms": 10_000}
"""A machine that stands still for a moment is no shortage of memory."""
BOUNDS = {torch.float16: 0.1, torch.bfloat16: 0.3}
"""Between log-probabilities of a token, as rounding moves them: on a CPU Transformers' own differ by up to 0.015 and
0.05 from those in float32."""
TELLS = 1.0
"""Between log-probabilities, for a token that tells one set of weights from another."""


class Reference:
    """Transformers with one set of weights, in float32 on the host."""

    def __init__(self, path: Path) -> None:
        from transformers import AutoModelForCausalLM

        self._model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
        self._known: dict[tuple[int, ...], torch.Tensor] = {}

    def logprobs(self, prompt: Sequence[int], said: Sequence[int]) -> torch.Tensor:
        """[tokens said, vocabulary]: how likely each token of the vocabulary was in the place of each that was said."""
        text = (*prompt, *said)
        if text not in self._known:
            with torch.inference_mode():
                rows = self._model(torch.tensor([text])).logits[0, len(prompt) - 1 : -1]
                self._known[text] = torch.log_softmax(rows.float(), dim=-1)
        return self._known[text]

    def differs(self, prompt: Sequence[int], answer: harness.Answer) -> tuple[float, float]:
        """(most that the likelihood of one of its tokens differs, most by which one was less likely than the best)."""
        rows = self.logprobs(prompt, answer.tokens)
        chosen = rows.gather(1, torch.tensor(answer.tokens)[:, None])[:, 0]
        told = torch.tensor([each.logprob for each in answer.logprobs])
        return float((told - chosen).abs().max()), float((rows.max(dim=-1).values - chosen).max())


def adapter(name: str, path: Path) -> common_pb2.Adapter:
    return common_pb2.Adapter(name=name, base=MODEL, path=str(path), generation=1)


def make_prompts(count: int, vocabulary: int, seed: int) -> list[list[int]]:
    """Of three to a dozen pages."""
    chance = random.Random(seed)
    return [[chance.randrange(2, vocabulary) for _ in range(chance.randrange(50, 200))] for _ in range(count)]


class Serving:
    """A base that an engine holds, with its adapters, and what is expected of them."""

    def __init__(
        self, end: EngineEnd, folders: dict[str, Path], references: dict[str, Reference], bound: float, seed: int = 5
    ) -> None:
        self.end = end
        self.folders = folders
        self.references = references
        self.prompts = make_prompts(4, SHAPE["vocab_size"], seed)
        self._bound = bound

    def ask(self, request_id: str, name: str, number: int, new: int = NEW) -> None:
        of = adapter(name, self.folders[name]) if name else None
        self.end.ask(request_id, self.prompts[number], new, adapter=of, ignore_eos=True, logprobs=True)

    async def right(self, request_id: str, name: str, number: int, new: int = NEW) -> harness.Answer:
        answer = await self.end.answer(request_id)
        assert (answer.error, answer.finish, len(answer.tokens)) == ("", common_pb2.LENGTH, new), request_id
        differs, worse = self.references[name].differs(self.prompts[number], answer)
        assert differs < self._bound and worse < 2 * self._bound, (request_id, differs, worse)
        return answer

    async def burst(self, tag: str, names: Sequence[str], copies: int = 1, new: int = NEW) -> list[harness.Answer]:
        """All prompts of all these adapters at once."""
        asked = [
            (f"{tag} {name} {number} {copy}", name, number)
            for copy in range(copies)
            for number in range(len(self.prompts))
            for name in names
        ]
        for request_id, name, number in asked:
            self.ask(request_id, name, number, new)
        return [await self.right(request_id, name, number, new) for request_id, name, number in asked]


def make_base(folder: Path) -> Path:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(3)
    model = LlamaForCausalLM(LlamaConfig(**SHAPE)).eval()
    model.generation_config.pad_token_id = 1
    model.save_pretrained(folder)
    return folder


@contextlib.asynccontextmanager
async def engine_at(node: Node) -> AsyncIterator[tuple[EngineEnd, harness.Node]]:
    async with harness.engine() as end:
        at = harness.Node(BalloondClient(node.address), node.handoff, DEVICE)
        yield end, at
        await at.client.close()


def load_of(at: harness.Node, path: Path, rank: int, slots: int, **options: int) -> engine_pb2.Load:
    load = harness.load(at, MODEL, path, context_tokens=512, **{**OPTIONS, **PATIENT, **options})
    load.kv_extent_bytes = EXTENT
    load.model.adapters.CopyFrom(common_pb2.AdapterPool(slots=slots, rank=rank, modules=small_adapters.ALL))
    return load


async def test_adapters_answer_as_merged_weights_in_mixed_batches_in_little_memory_and_after_hibernation(
    node: Node, tmp_path: Path
) -> None:
    base = make_base(tmp_path / "base")
    folders = {
        "a": small_adapters.write(base, tmp_path / "a", rank=RANK, lora_alpha=RANK / 4),
        # Few layers, and a rank and a scale of another kind.
        "b": small_adapters.write(
            base, tmp_path / "b", rank=6, modules=("k_proj", "up_proj"), layers=(0, 2), seed=8, use_rslora=True
        ),
    }
    whole = {"": base} | {name: small_adapters.merged(base, at, tmp_path / f"w-{name}") for name, at in folders.items()}
    references = {name: Reference(path) for name, path in whole.items()}
    await node.book(MODEL, weights=WEIGHTS, floor=FLOOR)
    async with engine_at(node) as (end, at):
        mapped, measured = await end.hold(load_of(at, base, RANK, slots=2))
        assert measured.weights_bytes > mapped.weights_bytes, "the buffers are counted"
        serving = Serving(end, folders, references, BOUNDS[torch.float16])

        answers = await serving.burst("mixed", NAMES)  # three in two slots: they take turns
        for number, answer in enumerate(answers):
            prompt, name = serving.prompts[number // len(NAMES)], NAMES[number % len(NAMES)]
            for other in set(NAMES) - {name}:
                assert references[other].differs(prompt, answer)[0] > TELLS, f"{name} says what {other} says"
        await serving.burst("many", NAMES, copies=10)  # as many as may run at once

        for name in NAMES:  # each finds its own prefixes
            await serving.burst("computed", (name,))
            assert min(each.cached_tokens for each in await serving.burst("cached", (name,))) > 0
        fresh = Serving(end, folders, references, BOUNDS[torch.float16], seed=6)
        for name in NAMES:  # and nobody else's
            assert max(each.cached_tokens for each in await fresh.burst("fresh", (name,))) == 0

        # What runs finds no page of KV any more, and goes on later.
        asked = [(f"long {name} {i} {copy}", name, i) for copy in range(3) for i in range(4) for name in ("a", "b")]
        for request in asked:
            serving.ask(*request, new=LONG)
        await end.until(lambda: all(end.answers[request_id].tokens for request_id, _, _ in asked))
        await at.limit(MODEL, FLOOR)
        await end.until(lambda: end.stats.retractions > 0)
        await at.limit(MODEL, 64 * EXTENT)
        for request in asked:
            await serving.right(*request, new=LONG)
        mover = tasks.spawn(move_limit(at, end), "limit")
        for turn in range(4):
            await serving.burst(f"moving {turn}", NAMES, copies=2)
        await tasks.cancel(mover)
        assert end.stats.evicted_tokens > 0
        await at.limit(MODEL, 64 * EXTENT)

        image, lease_id = Image(node.handoff, DEVICE, mapped.weights_bytes), mapped.lease_id
        for nap in range(2):
            await end.until(lambda: not end.stats.running)
            await image.take(lease_id)
            await image.tidied()
            await end.do(hibernate=engine_pb2.Hibernate())
            await node.until(lambda device: device.leased_bytes == 0)  # the buffers left too
            end.send(wake=engine_pb2.Wake())
            again = (await end.hear("weights_mapped")).weights_mapped
            assert again.manifest == mapped.manifest, "adapters are no part of an image"
            lease_id = again.lease_id
            await image.put(lease_id)
            await image.tidied()
            await end.do(verify=engine_pb2.Verify(command_id=again.command_id))
            await serving.burst(f"awake {nap}", ("b", "a", ""))
            await serving.burst(f"awake {nap}, many", ("a", "b"), copies=10)
        await image.close()


async def move_limit(at: harness.Node, end: EngineEnd) -> None:
    """For ever, another limit every few steps."""
    chance = random.Random(3)
    while True:
        await at.limit(MODEL, chance.choice([4, 5, 8, 64]) * EXTENT)
        await end.steps(4)


async def test_an_adapter_of_each_class_answers_as_merged_weights(node: Node, tmp_path: Path) -> None:
    """One engine for all, with room for other ranks each time: what it has compiled for one it must not use for the
    next. Those that are wrong are told together."""
    wrong: dict[str, str] = {}
    async with engine_at(node) as (end, at):
        for number, architecture in enumerate(name for name, known in classes.CLASSES.items() if known.adapters):
            rank = (4, 8)[number % 2]
            folder = small_checkpoints.write(architecture, tmp_path / architecture)
            path = small_adapters.write(folder, tmp_path / f"{architecture}-a", rank=rank, lora_alpha=rank)
            whole = small_adapters.merged(folder, path, tmp_path / f"{architecture}-whole")
            # SGLang serves float32 checkpoints in float16, and those of Gemma's classes in bfloat16.
            bound = BOUNDS[torch.bfloat16 if architecture.startswith("Gemma") else torch.float16]
            serving = Serving(end, {"a": path}, {"": Reference(folder), "a": Reference(whole)}, bound)
            await node.book(MODEL, weights=WEIGHTS, floor=FLOOR)
            try:
                await end.hold(load_of(at, folder, rank, slots=2, max_running_requests=8))
                answers = (await serving.burst(architecture, ("a", "")))[::2]
                told = [
                    serving.references[""].differs(prompt, answer)[0]
                    for prompt, answer in zip(serving.prompts, answers, strict=True)
                ]
                assert max(told) > TELLS, f"the adapter changes too little: {told}"
            except AssertionError as error:
                wrong[architecture] = " ".join(str(error).split())[:300]
            end.send(unload=engine_pb2.Unload())
            await end.hear("done", "failed")
    assert not wrong
