"""Answers that have to be what a grammar says, from a real engine: whole, in parts that different engines say, through
sleep, retraction and a change of the model."""

from __future__ import annotations

import asyncio
import json
import re
import shutil
from pathlib import Path

import jsonschema
import pytest

from gateway.schemas import grammar
from gateway.tools import structural_tags
from protos import common_pb2, engine_pb2
from testing.engines.harness import KV_EXTENT, Answer, EngineEnd, Images, load, node
from tests.gateway import tokenizers
from tests.gpu_scheduler.engines.sglang.checkpoints import CONTEXT
from tests.gpu_scheduler.engines.sglang.grammars import SLOW, large
from tests.gpu_scheduler.engines.sglang.shared import Engines

pytestmark = [pytest.mark.sglang, pytest.mark.asyncio(loop_scope="session")]
PROMPT = list(range(20, 60))
SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"enum": ["Bern", "Genève", "Zürich"]},
        "degrees": {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 99}, "maxItems": 1},
        "note": {"type": "string", "pattern": "^[a-zü ]{0,8}$"},
    },
    "required": ["city", "degrees", "note"],
    "additionalProperties": False,
}
KEPT = {"ebnf": grammar.of(SCHEMA)}
"""As a gateway sends it."""


def after_reasoning(grammar: dict[str, str]) -> str:
    """A grammar that applies after some reasoning, which ends with an "e": the model is no good, and will say one."""
    sampling = common_pb2.Sampling(**grammar)  # type: ignore[arg-type]
    structural_tags.after_reasoning(sampling, "", "e", begun=True)
    return sampling.structural_tag


REASONS = {"structural_tag": after_reasoning(KEPT)}
REGEX = r"[a-z]{3}-(0|1){4}"
EBNF = 'root ::= "<" ("one" | "two") ">" root?'
LIMIT = 200 * KV_EXTENT


@pytest.fixture(scope="module")
def folders(models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The checkpoints, with a tokenizer that has their end token."""
    made = {}
    for name, path in models.items():
        made[name] = tmp_path_factory.mktemp("spoken") / name
        shutil.copytree(path, made[name])
        tokenizers.write(tokenizers.tiny(), made[name])
    return made


def text(answer: Answer) -> str:
    return str(tokenizers.tiny().decode(answer.tokens, skip_special_tokens=True))


async def said(end: EngineEnd, name: str, seed: int = 3, most: int = 440, **grammar: str) -> Answer:
    end.ask(name, PROMPT, most, temperature=1.0, seed=seed, **grammar)
    return await end.answer(name)


def fits(answer: Answer) -> None:
    assert (answer.finish, answer.error) == (common_pb2.STOP, "")
    jsonschema.validate(json.loads(text(answer)), SCHEMA)


async def goes_on_anywhere(end: EngineEnd, tag: str, whole: Answer, **grammar: str) -> None:
    """Wherever it is interrupted the answer is taken up as one that has said what it has."""
    cuts = range(1, len(whole.tokens), 1 + len(whole.tokens) // 6)
    for told in cuts:
        end.ask(f"{tag}-{told}", PROMPT, 440, resumed=whole.tokens[:told], temperature=1.0, seed=3, **grammar)
    for told in cuts:
        rest = await end.answer(f"{tag}-{told}")
        assert (rest.tokens, rest.finish, rest.error) == (whole.tokens[told:], common_pb2.STOP, ""), told


async def test_answers_match_their_grammar_and_go_on_where_others_were_interrupted(
    tmp_path: Path, engines: Engines, folders: dict[str, Path]
) -> None:
    async with node(tmp_path) as at, engines.one() as end:
        for model in ("qwen", "llama"):
            await at.book(model, floor_bytes=LIMIT)
            images = Images(at)
            mapped, _ = await end.hold(load(at, model, folders[model], context_tokens=CONTEXT))

            plain = await said(end, f"{model}-plain", most=30)
            for seed in range(2, 4):
                fits(await said(end, f"{model}-{seed}", seed, **KEPT))
            fits(await said(end, f"{model}-schema", json_schema=json.dumps(SCHEMA)))
            assert re.fullmatch(REGEX, text(await said(end, f"{model}-regex", regex=REGEX)))
            assert re.fullmatch("(<(one|two)>)+", text(await said(end, f"{model}-ebnf", ebnf=EBNF)))
            whole = end.answers[f"{model}-3"]
            await goes_on_anywhere(end, f"{model}-known", whole, **KEPT)
            thought = await said(end, f"{model}-reasons", **REASONS)
            before, mark, after = text(thought).partition("e")
            assert thought.finish == common_pb2.STOP and before and mark
            jsonschema.validate(json.loads(after), SCHEMA)
            await goes_on_anywhere(end, f"{model}-reasoned", thought, **REASONS)
            if model == "llama":  # of another shape, in a process that had one before
                images.close()
                await end.do(unload=engine_pb2.Unload())
                continue

            # What cannot be compiled is refused, with the reason; everything else goes on.
            beside = asyncio.get_running_loop().create_task(said(end, f"{model}-beside", **KEPT))
            for number, (kind, wrong, why) in enumerate(
                [
                    ("json_schema", '{"type": "strin"}', 'Unsupported type "strin"'),
                    ("json_schema", '{"type": ', "is not JSON"),
                    ("json_schema", '{"items":' * 70 + "{}" + "}" * 70, "levels"),
                    ("regex", "(a", "parenthesis is not closed"),
                    ("ebnf", "root ::= nothing", 'Rule "nothing" is not defined'),
                    ("json_schema", '{"$ref": "#"}', "allows no answer"),
                ]
            ):
                for again in range(2 - number % 2):
                    answer = await said(end, f"{model}-wrong-{number}-{again}", **{kind: wrong})
                    assert (answer.finish, answer.tokens) == (common_pb2.REJECTED, [])
                    assert why in answer.error and "/" not in answer.error, answer.error
            # One that is slower with every token ends by itself, and others' answers with what they are.
            answer = await said(end, f"{model}-slow", most=2000, ebnf=SLOW)
            assert answer.finish == common_pb2.REJECTED and "takes too long" in answer.error
            assert (await said(end, f"{model}-beside slow", most=30)).tokens == plain.tokens
            end.ask("never ends", PROMPT, 9, ignore_eos=True, regex=REGEX)
            assert (await end.answer("never ends")).finish == common_pb2.REJECTED
            end.answers.pop("never ends")
            other = await said(end, f"{model}-other", json_schema='{"const": 1}')
            end.ask(f"{model}-not so", PROMPT, 9, resumed=other.tokens, regex=REGEX)
            answer = await end.answer(f"{model}-not so")
            assert answer.finish == common_pb2.REJECTED and "does not match its grammar" in answer.error
            assert (await beside).tokens == whole.tokens
            assert (await said(end, f"{model}-plain again", most=30)).tokens == plain.tokens

            # Asleep and awake: no grammar is known any more, and some requests are sent that wait for the same one.
            image = await images.take(mapped.lease_id)
            await end.do(hibernate=engine_pb2.Hibernate())
            end.send(wake=engine_pb2.Wake())
            awake = (await end.hear("weights_mapped")).weights_mapped
            await images.put(awake.lease_id, image)
            await end.do(verify=engine_pb2.Verify(command_id=awake.command_id))
            await goes_on_anywhere(end, f"{model}-awake", whole, **KEPT)
            images.close()
            await end.do(unload=engine_pb2.Unload())


async def test_grammar_of_a_retracted_request_holds_when_the_request_goes_on(
    tmp_path: Path, engines: Engines, folders: dict[str, Path]
) -> None:
    async with node(tmp_path) as at, engines.one() as end:
        await at.book("qwen", floor_bytes=4 * KV_EXTENT)
        await end.hold(load(at, "qwen", folders["qwen"], context_tokens=CONTEXT, overlap=1))
        await at.limit("qwen", LIMIT)
        for turn in range(5):
            names = [f"{turn}-{seed}" for seed in range(5)]
            for seed, name in enumerate(names):
                end.ask(name, PROMPT, 440, temperature=1.0, seed=seed, **KEPT)
                end.ask(name + "-free", PROMPT, 100, ignore_eos=True)
            while not all(end.answers[name].ended.is_set() for name in names):
                for extents in (5, 60):
                    await at.limit("qwen", extents * KV_EXTENT)
                    await end.steps(4)
            await at.limit("qwen", LIMIT)
            for name in names:
                if not end.answers[name].parked:
                    fits(await end.answer(name))
                await end.answer(name + "-free")
            if end.stats.retractions:
                break
        assert end.stats.retractions


@pytest.mark.parametrize("moves", [False, True])
async def test_request_waiting_for_its_grammar_is_handed_back_as_it_came(
    tmp_path: Path, engines: Engines, folders: dict[str, Path], moves: bool
) -> None:
    async with node(tmp_path) as at, engines.one() as end:
        await at.book("llama", floor_bytes=LIMIT)
        await end.hold(load(at, "llama", folders["llama"], context_tokens=CONTEXT, page_size=16, overlap=1))
        # One is compiled at a time: the last waits for ten seconds.
        for longest in range(18, 30):
            end.ask(f"large-{longest}", PROMPT, 440, json_schema=large(300, longest))
        end.ask("early", PROMPT, 440, temperature=1.0, seed=3, **KEPT)
        if moves:
            end.send(export_kv=engine_pb2.ExportKv(live=False))
            assert not (await end.hear("kv_places")).kv_places.sequences
            await end.hear("done")
        await end.do(drain=engine_pb2.Drain(finish_ms=0))
        answer = await end.answer("early")
        assert (answer.finish, answer.tokens, answer.error) == (common_pb2.FAILED, [], "handed back")
        await end.do(unload=engine_pb2.Unload())
        await end.hold(load(at, "llama", folders["llama"], context_tokens=CONTEXT))
        fits(await said(end, "again", **KEPT))
        await end.do(unload=engine_pb2.Unload())
