"""Contexts beyond the length that a model was made with: engines say what Transformers says, in every form in which
published models write their rotary embeddings down."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from loader.checkpoints.checkpoint import read
from protos import common_pb2, engine_pb2
from testing.engines.harness import EngineEnd, Node, load, node
from tests.gpu_scheduler.engines.sglang import checkpoints
from tests.gpu_scheduler.engines.sglang.shared import Engines

pytestmark = [pytest.mark.sglang, pytest.mark.asyncio(loop_scope="session")]
MADE_WITH = 96
CONTEXT = 4 * MADE_WITH
NEW_TOKENS = 8
LENGTHS = (12, MADE_WITH - 4, MADE_WITH + 20, CONTEXT - NEW_TOKENS)
"""Of prompts: short, across the edge, beyond it, to the end."""
PAIRS = 16
LISTS = {"short_factor": [1.0 + 0.1 * n for n in range(PAIRS)], "long_factor": [2.0 + 0.5 * n for n in range(PAIRS)]}
YARN = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": MADE_WITH}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
CARD = {"max_position_embeddings": MADE_WITH}
STRETCHED = {"max_position_embeddings": CONTEXT}
FORMS: dict[str, dict[str, Any]] = {
    "none": STRETCHED,
    "linear": {**CARD, "rope_scaling": {"type": "linear", "factor": 4.0}},
    "linear, whole": {**CARD, "rope_scaling": {"rope_type": "linear", "factor": 4, **YARN, "type": "linear"}},
    "yarn": {**CARD, "rope_scaling": YARN},
    "yarn, stretched": {**STRETCHED, "rope_scaling": YARN},
    "yarn, parameters": {**CARD, "rope_parameters": {"rope_type": "yarn", "rope_theta": 5e3, "factor": 4}},
    "yarn, scaled": {**CARD, "rope_scaling": {**YARN, "attention_factor": 0.8, "beta_fast": None, "beta_slow": 2}},
    "yarn, beside": {
        "max_position_embeddings": CONTEXT,
        "original_max_position_embeddings": MADE_WITH,
        "rope_scaling": {"type": "yarn", "factor": 4.0},
    },
    "llama3": {**STRETCHED, "rope_scaling": {**LLAMA3, "original_max_position_embeddings": MADE_WITH}},
    "longrope": {
        **STRETCHED,
        "rope_scaling": {"type": "longrope", **LISTS, "original_max_position_embeddings": MADE_WITH},
    },
}
QWEN = {"none": STRETCHED, "yarn, beside": FORMS["yarn, beside"]}
"""Another of SGLang's models, which reads its configuration otherwise."""


def write(folder: Path, form: dict[str, Any], make: Any = checkpoints.llama) -> Path:
    path = make(folder) / "config.json"
    config = {**json.loads(path.read_text()), **form}
    if "rope_scaling" in form:
        del config["rope_parameters"]
        config["rope_theta"] = 1e4
    path.write_text(json.dumps(config))
    (folder / "tokenizer.json").write_text("{}")
    return folder


def prompts(lengths: Sequence[int] = LENGTHS) -> list[list[int]]:
    generator = torch.Generator().manual_seed(7)
    return [torch.randint(2, checkpoints.VOCABULARY, (length,), generator=generator).tolist() for length in lengths]


async def says(end: EngineEnd, asked: Sequence[Sequence[int]]) -> list[list[int]]:
    """Greedily, all at once and in small steps."""
    for number, prompt in enumerate(asked):
        end.ask(f"{number}", prompt, NEW_TOKENS, ignore_eos=True)
    said = []
    for number in range(len(asked)):
        answer = await end.answer(f"{number}")
        assert (answer.finish, answer.error) == (common_pb2.LENGTH, ""), number
        said.append(answer.tokens)
    end.answers.clear()
    return said


async def serve(at: Node, end: EngineEnd, folder: Path, context: int = CONTEXT) -> list[list[int]]:
    """What an engine says of the prompts with the context that the loader finds, of which a catalogue may want less."""
    found = read(folder, 4).context_tokens
    assert found == CONTEXT
    await end.hold(load(at, "m", folder, context_tokens=min(context, found), chunked_prefill_size=64))
    said = await says(end, prompts([length for length in LENGTHS if length + NEW_TOKENS <= context]))
    await end.do(unload=engine_pb2.Unload())
    return said


async def test_stretched_contexts_are_served_as_transformers_does(tmp_path: Path, engines: Engines) -> None:
    made = [(name, checkpoints.llama, form) for name, form in FORMS.items()]
    made += [(f"qwen, {name}", checkpoints.qwen, form) for name, form in QWEN.items()]
    expected: dict[str, list[list[int]]] = {}
    async with node(tmp_path) as at, engines.one() as end:
        await at.book("m")
        for name, make, form in made:
            folder = write(tmp_path / name, form, make)
            expected[name] = checkpoints.reference(folder, prompts(), NEW_TOKENS)
            said = await serve(at, end, folder)
            if "longrope" in form.get("rope_scaling", {}).get("type", ""):
                # Transformers takes other factors for a request that stays short, an engine one list for all.
                assert said[2:] == expected[name][2:], name
            else:
                assert said == expected[name], name
        first_name = {**FORMS["longrope"]["rope_scaling"], "type": "su"}
        su = write(tmp_path / "su", {**STRETCHED, "rope_scaling": first_name})
        assert (await serve(at, end, su))[2:] == expected["longrope"][2:]
        short = MADE_WITH
        assert await serve(at, end, tmp_path / "longrope", short) == expected["longrope"][:1], "no request is long"
    kinds = ("none", "linear", "yarn", "llama3", "longrope")
    beyond = [expected[name][2:] for name in kinds]
    assert all(one not in beyond[:number] for number, one in enumerate(beyond)), "each form has to show"


async def test_dynamic_rope_is_transformers_at_full_length_and_unstretched_in_a_short_context(
    tmp_path: Path, engines: Engines
) -> None:
    from transformers import AutoModelForCausalLM

    folder = write(tmp_path / "dynamic", {**CARD, "rope_scaling": {"type": "dynamic", "factor": 4.0}})
    plain = write(tmp_path / "plain", CARD)
    prompt = prompts()[-1]
    async with node(tmp_path) as at, engines.one() as end:
        await at.book("m")
        said = (await serve(at, end, folder))[-1]
        # Transformers' base grows with each request's length, and with each of its tokens: it is an engine's where a
        # request is as long as the context. So all of it is asked at once, and each token has to be what it expects.
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        with torch.inference_mode():
            logits = model(torch.tensor([[*prompt, *said]])).logits[0]
        assert logits[-NEW_TOKENS - 1 : -1].argmax(-1).tolist() == said and len(prompt) + len(said) == CONTEXT
        (short,) = await serve(at, end, folder, MADE_WITH)
        assert [short] == checkpoints.reference(plain, prompts()[:1], NEW_TOKENS)


async def test_context_whose_table_is_larger_than_twice_the_weights_is_served(tmp_path: Path, engines: Engines) -> None:
    folder = write(tmp_path / "long", {"max_position_embeddings": 1 << 17})
    found = read(folder, 4)
    async with node(tmp_path) as at, engines.one() as end:
        await at.book("m")
        await end.hold(load(at, "m", folder, context_tokens=found.context_tokens, weights_bytes=found.weights_bytes))
        assert await says(end, prompts([12])) == checkpoints.reference(folder, prompts([12]), NEW_TOKENS)


async def test_a_table_has_no_rows_for_tokens_that_the_context_does_not_have(tmp_path: Path, engines: Engines) -> None:
    folder = write(tmp_path / "long", {"max_position_embeddings": 1 << 17})
    found = read(folder, 4)
    async with node(tmp_path) as at, engines.one() as end:
        await at.book("m")
        rows = {}
        for context in (1 << 17, CONTEXT):
            mapped, _ = await end.hold(load(at, "m", folder, context_tokens=context, weights_bytes=found.weights_bytes))
            tensors = engine_pb2.Manifest.FromString(mapped.manifest).tensors
            (rows[context],) = {tensor.shape[0] for tensor in tensors if tensor.name.endswith("cos_sin_cache")}
            assert await says(end, prompts()) == checkpoints.reference(folder, prompts(), NEW_TOKENS)
            await end.do(unload=engine_pb2.Unload())
        assert rows[1 << 17] >= 1 << 17 and CONTEXT <= rows[CONTEXT] < 2 * CONTEXT + 256


@pytest.mark.parametrize("name", FORMS)
async def test_weights_with_the_tables_of_an_embedding_are_those_that_the_loader_expects(
    tmp_path: Path, engines: Engines, name: str
) -> None:
    folder = write(tmp_path / "m", FORMS[name])
    found = read(folder, 4)
    async with node(tmp_path) as at, engines.one() as end:
        await at.book("m")
        for context in (CONTEXT, MADE_WITH):
            mapped, _ = await end.hold(load(at, "m", folder, context_tokens=context))
            assert checkpoints.laid_out(mapped.manifest) == found.held_bytes(context)
            await end.do(unload=engine_pb2.Unload())


async def test_a_context_that_the_embedding_is_not_made_for_is_refused_with_both_numbers(
    tmp_path: Path, engines: Engines
) -> None:
    async with node(tmp_path) as at, engines.one() as end:
        await at.book("m")
        for name in ("none", "linear", "yarn", "llama3", "longrope"):
            folder = write(tmp_path / name, FORMS[name])
            failed = await end.fail(load=load(at, "m", folder, context_tokens=CONTEXT + 1))
            assert failed.model_at_fault and failed.reason == (
                f"its context is {CONTEXT + 1} tokens by the catalogue, its rotary embedding is made for {CONTEXT}"
            )
        assert await at.leased_bytes() == 0
