"""A real engine serving: the order of requests, their ends, what is refused, and the prefill turn."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from gpu_scheduler.engines import shared_board
from gpu_scheduler.engines.sharing.throttle import FREE, PrefillThrottle
from kv_kinds.layout import of_tokens
from loader.policy.floor import floor_bytes
from protos import common_pb2, engine_pb2
from testing import small_checkpoints
from testing.engines.harness import KV_EXTENT, EngineEnd, load, node
from tests.gpu_scheduler.engines.sglang.checkpoints import CONTEXT, VOCABULARY
from tests.gpu_scheduler.engines.sglang.conftest import INDEX, NEW_TOKENS, Motion
from tests.gpu_scheduler.engines.sglang.shared import Engines

pytestmark = [pytest.mark.sglang, pytest.mark.asyncio(loop_scope="session")]
TOKEN_BYTES = 3 * 2 * 2 * 32 * 4
"""Of the KV of "llama"."""


async def _impossible_requests(end: EngineEnd) -> None:
    end.ask("empty", [], 4)
    end.ask("long", [5] * CONTEXT, 4)
    end.ask("foreign", [VOCABULARY], 4)
    end.ask("hot", [5, 6], 4, temperature=-1.0)
    for name, why in (("empty", "empty"), ("long", "context"), ("foreign", "vocabulary"), ("hot", "temperature")):
        answer = await end.answer(name)
        assert answer.finish == common_pb2.REJECTED and why in answer.error


async def _logprobs(end: EngineEnd, path: Path, prompt: list[int]) -> None:
    """They are the model's own, also when tokens are drawn at another temperature."""
    from transformers import AutoModelForCausalLM

    end.ask("cold", prompt, 5, ignore_eos=True, logprobs=True, top_logprobs=3)
    end.ask("warm", prompt, 5, ignore_eos=True, logprobs=True, temperature=0.7, seed=11)
    end.ask("plain", prompt, 5, ignore_eos=True)
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    for name in ("cold", "warm"):
        answer = await end.answer(name)
        assert len(answer.logprobs) == len(answer.tokens) == 5
        with torch.inference_mode():
            logits = model(torch.tensor([prompt + answer.tokens])).logits[0, len(prompt) - 1 : -1]
        right = torch.log_softmax(logits, dim=-1)
        for place, (token, told) in enumerate(zip(answer.tokens, answer.logprobs, strict=True)):
            assert math.isclose(told.logprob, right[place, token].item(), abs_tol=1e-3)
    top = end.answers["cold"].logprobs[0].top
    assert [t.token_id for t in top] == torch.topk(right_first(model, prompt), 3).indices.tolist()
    assert not (await end.answer("plain")).logprobs and not end.answers["warm"].logprobs[0].top


def right_first(model: torch.nn.Module, prompt: list[int]) -> torch.Tensor:
    with torch.inference_mode():
        return model(torch.tensor([prompt])).logits[0, -1]


async def _seeds(end: EngineEnd, prompt: list[int]) -> None:
    for name, seed in (("a", 7), ("b", 7), ("c", 8)):
        end.ask(f"seed-{name}", prompt, 24, ignore_eos=True, temperature=1.0, top_p=0.95, seed=seed)
    one, same, other = [(await end.answer(f"seed-{name}")).tokens for name in "abc"]
    assert one == same != other
    # A stream that goes on elsewhere, with what was said so far as its prompt, draws the same.
    end.ask("seed-rest", prompt + one[:10], 14, ignore_eos=True, temperature=1.0, top_p=0.95, seed=7)
    assert (await end.answer("seed-rest")).tokens == one[10:]
    # Nor does it matter what runs beside it: nobody, one that does not draw, some that limit their choices.
    said = []
    for beside in ({}, {"temperature": 0.0}, {"temperature": 0.8, "top_k": 5}, {"temperature": 0.8, "min_p": 0.3}):
        if beside:
            end.ask("seed-beside", prompt, 40, ignore_eos=True, **beside)
        end.ask("seed-plain", prompt, 24, ignore_eos=True, temperature=1.0, seed=9)
        said.append((await end.answer("seed-plain")).tokens)
        if beside:
            await end.answer("seed-beside")
        end.answers.clear()
    assert said[0] == said[1] == said[2] == said[3]
    # Of which nothing is left, it says what is likeliest.
    for name, limit in (("greedy", {"temperature": 0.0}), ("likeliest", {"temperature": 1.0, "min_p": 1.0})):
        end.ask(f"seed-{name}", prompt, 24, ignore_eos=True, **limit)
    assert (await end.answer("seed-greedy")).tokens == (await end.answer("seed-likeliest")).tokens


PENALTIES: tuple[dict[str, float], ...] = (
    {"frequency_penalty": 0.9},
    {"presence_penalty": 1.5},
    {"repetition_penalty": 1.3},
    {"frequency_penalty": 0.4, "presence_penalty": 0.3, "repetition_penalty": 1.1},
)


async def _penalties(end: EngineEnd, tag: str, prompt: list[int], unpenalized: list[int]) -> list[list[int]]:
    """What was said before the seam counts behind it; beside requests that have no penalties, and others."""
    for i, penalty in enumerate(PENALTIES):
        end.ask(f"{tag}-{i}", prompt, NEW_TOKENS, ignore_eos=True, **penalty)
    whole = [(await end.answer(f"{tag}-{i}")).tokens for i in range(len(PENALTIES))]
    assert unpenalized not in whole, "each penalty has to show"
    for cut in (1, 17, NEW_TOKENS - 1):
        for i, penalty in enumerate(PENALTIES):
            name = f"{tag}-{i}-from-{cut}"
            end.ask(name, prompt, NEW_TOKENS - cut, resumed=whole[i][:cut], ignore_eos=True, **penalty)
        end.ask(f"{tag}-plain-{cut}", prompt, NEW_TOKENS - cut, resumed=unpenalized[:cut], ignore_eos=True)
        for i, tokens in enumerate(whole):
            assert (await end.answer(f"{tag}-{i}-from-{cut}")).tokens == tokens[cut:]
        assert (await end.answer(f"{tag}-plain-{cut}")).tokens == unpenalized[cut:]
    return whole


async def _stop_tokens(end: EngineEnd, prompt: list[int], said: list[int]) -> None:
    stop = said[6]
    first = said.index(stop)
    end.ask("stop", prompt, NEW_TOKENS, stop_token_ids=[stop])
    answer = await end.answer("stop")
    assert answer.finish == common_pb2.STOP and answer.tokens == said[: first + 1]
    end.ask("at-least", prompt, NEW_TOKENS, stop_token_ids=[stop], min_new_tokens=first + 2)
    answer = await end.answer("at-least")
    assert len(answer.tokens) >= first + 2 and stop not in answer.tokens[: first + 2]
    # Half of the least was said elsewhere.
    whole, cut = answer.tokens, (first + 2) // 2 or 1
    left = NEW_TOKENS - cut
    end.ask("rest", prompt, left, resumed=whole[:cut], stop_token_ids=[stop], min_new_tokens=first + 2)
    assert (await end.answer("rest")).tokens == whole[cut:]


@pytest.mark.parametrize("ends", [None, VOCABULARY + 7], ids=["none", "in no vocabulary"])
async def test_model_without_a_usable_end_token_takes_a_least_number_of_tokens(
    tmp_path: Path,
    engines: Engines,
    models: dict[str, Path],
    prompts: list[list[int]],
    said: dict[str, list[list[int]]],
    ends: int | None,
) -> None:
    endless = shutil.copytree(models["llama"], tmp_path / "endless")
    for name in ("config.json", "generation_config.json"):
        told = json.loads((endless / name).read_text()) | {"eos_token_id": ends}
        (endless / name).write_text(json.dumps(told))
    async with node(tmp_path) as at, engines.one() as end:
        await at.book("endless", floor_bytes=16 * KV_EXTENT)
        await end.hold(load(at, "endless", endless, context_tokens=CONTEXT))
        end.ask("beside", prompts[0], 30, ignore_eos=True)
        end.ask("at least", prompts[0], 30, min_new_tokens=20)
        assert (await end.answer("at least")).tokens == said["llama"][0][:30]
        assert (await end.answer("beside")).tokens == said["llama"][0][:30]
        await end.do(unload=engine_pb2.Unload())


async def test_requests_without_memory_wait_then_go_back_to_the_shared_queue(
    tmp_path: Path,
    engines: Engines,
    models: dict[str, Path],
    prompts: list[list[int]],
    said: dict[str, list[list[int]]],
) -> None:
    async with node(tmp_path) as at, engines.one() as end:
        await at.book("llama", floor_bytes=2 * KV_EXTENT)
        await at.limit("llama", 2 * KV_EXTENT)
        end.send(load=load(at, "llama", models["llama"], context_tokens=CONTEXT, park_after_ms=1000))
        await end.hear("weights_mapped")
        failed = (await end.hear("failed")).failed
        assert "no KV memory for a pass" in failed.reason and not failed.model_at_fault
        await at.limit("llama", -1)
        await end.hold(load(at, "llama", models["llama"], context_tokens=CONTEXT, park_after_ms=3000))
        tokens = KV_EXTENT // TOKEN_BYTES
        await at.limit("llama", 3 * KV_EXTENT)
        end.ask("big", [2 + i % 1000 for i in range(4 * tokens)], 4)
        end.ask("small", prompts[0][:10], 4, ignore_eos=True)
        assert (await end.answer("big")).parked
        assert (await end.answer("small")).finish == common_pb2.LENGTH

        # One that fits at first and grows out of its limit: what it said was delivered, and what follows elsewhere
        # is what it would have said.
        await at.limit("llama", 9 * KV_EXTENT)
        end.ask("growing", prompts[0], CONTEXT - len(prompts[0]), ignore_eos=True)
        answer = await end.answer("growing")
        assert answer.parked and NEW_TOKENS < len(answer.tokens) < CONTEXT - len(prompts[0])
        assert answer.tokens[:NEW_TOKENS] == said["llama"][0]
        await at.limit("llama", 60 * KV_EXTENT)
        end.ask("again", prompts[0] + answer.tokens, 8, ignore_eos=True)
        end.ask("whole", prompts[0], len(answer.tokens) + 8, ignore_eos=True)
        assert answer.tokens + (await end.answer("again")).tokens == (await end.answer("whole")).tokens


@pytest.mark.parametrize("page_size", [1, 16, 64])
async def test_model_at_its_floor_serves_its_longest_requests_whatever_was_cached_before(
    page_size: int, tmp_path: Path, engines: Engines, models: dict[str, Path]
) -> None:
    """Whichever part of them is long, and though what was left to it by others lies here and there: pages lie over the
    edges of extents, and lose something at each end of a row of these."""
    floor = floor_bytes(CONTEXT, 0, of_tokens(TOKEN_BYTES), KV_EXTENT)
    options = {"page_size": page_size, "overlap": 1} if page_size > 1 else {}
    options["park_after_ms"] = 3000  # until then a request that fits if all cached tokens leave waits for memory
    async with node(tmp_path) as at, engines.one() as end:
        await at.book("llama", floor_bytes=floor)
        await end.hold(load(at, "llama", models["llama"], context_tokens=CONTEXT, large_extent=1, **options))
        for number in range(40):
            end.ask(f"cached {number}", [5 + number, *range(20 + number, 20 + number + 70)], 2, ignore_eos=True)
        for number in range(40):
            await end.answer(f"cached {number}")
        for number in range(0, 40, 3):  # and so that what was used last lies here and there
            end.ask(f"again {number}", [5 + number, *range(20 + number, 20 + number + 70)], 2, ignore_eos=True)
            await end.answer(f"again {number}")
        await at.limit("llama", floor)
        await end.until(lambda: end.stats.kv_held_bytes <= floor)
        end.ask("longest prompt", [3 + i % 1000 for i in range(CONTEXT - 1)], 1, ignore_eos=True)
        answer = await end.answer("longest prompt")
        assert answer.finish == common_pb2.LENGTH and len(answer.tokens) == 1
        end.ask("longest answer", [3], CONTEXT - 1, ignore_eos=True)
        answer = await end.answer("longest answer")
        assert answer.finish == common_pb2.LENGTH and len(answer.tokens) == CONTEXT - 1


async def test_waiting_requests_after_a_long_pause_start_in_the_order_of_priority(
    tmp_path: Path,
    engines: Engines,
    models: dict[str, Path],
    prompts: list[list[int]],
    said: dict[str, list[list[int]]],
    turns: shared_board.SharedBoard,
) -> None:
    async with node(tmp_path) as at, engines.one() as end:
        await at.book("llama")
        await end.hold(load(at, "llama", models["llama"], context_tokens=CONTEXT, max_running_requests=2))
        end.ask("running", prompts[0], 120, ignore_eos=True)
        await end.until(lambda: len(end.answers["running"].tokens) > 0)
        turns.set_throttle(INDEX, PrefillThrottle(pause_ratio=1e6))
        for priority in (30, 10, 20):
            end.ask(f"p{priority}", prompts[1], NEW_TOKENS, priority=priority, ignore_eos=True)
        assert len((await end.answer("running")).tokens) == 120, "pauses do not hold up decodes"
        assert end.order == ["running"]
        turns.set_throttle(INDEX, FREE)
        for priority in (10, 20, 30):
            assert (await end.answer(f"p{priority}")).tokens == said["llama"][1]
        assert end.order == ["running", "p10", "p20", "p30"]


def _truncate(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-5000])


def _lose(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    del weights["model.layers.1.self_attn.k_proj.weight"]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def _spoil(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    weights["model.layers.1.mlp.down_proj.weight"][0, 0] = float("nan")
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def _shorten(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    name = "model.layers.2.mlp.down_proj.weight"
    weights[name] = weights[name][:, :100].contiguous()
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def _garble(folder: Path) -> None:
    (folder / "config.json").write_text("{")


def _name_unknown_architecture(folder: Path) -> None:
    config = (folder / "config.json").read_text()
    (folder / "config.json").write_text(config.replace("LlamaForCausalLM", "NoSuchModel"))


BROKEN: list[tuple[Callable[[Path], None], str]] = [
    (_truncate, "SafetensorError"),
    (_lose, "does not set 1 of the model's parameters, or has NaN in them: model.layers.1.self_attn.qkv_proj.weight"),
    (_spoil, "does not set 1 of the model's parameters, or has NaN in them: model.layers.1.mlp.down_proj.weight"),
    (_shorten, "lacks 156 of the model's places"),
    (_garble, "not a valid JSON"),
    (_name_unknown_architecture, "NoSuchModel"),
]
BROKEN_FILES = 4
"""The first ones' weights are broken: whoever reads them says the same."""


async def test_broken_checkpoints_are_the_models_fault_and_the_engine_takes_the_next(
    tmp_path: Path,
    engines: Engines,
    models: dict[str, Path],
    prompts: list[list[int]],
    said: dict[str, list[list[int]]],
) -> None:
    async with node(tmp_path) as at, engines.one() as end:
        await at.book("llama")
        folder = tmp_path / "broken"
        for number, (breaks, why) in enumerate(BROKEN):
            shutil.rmtree(folder, ignore_errors=True)
            shutil.copytree(models["llama"], folder)
            breaks(folder)
            for threads in (0, 2) if number < BROKEN_FILES else (0,):
                of = load(at, "llama", folder, context_tokens=CONTEXT, read_threads=threads, read_ahead_bytes=300_000)
                failed = await end.fail(load=of)
                assert failed.model_at_fault and why in failed.reason and "\n" not in failed.reason
                assert await at.leased_bytes() == 0
        failed = await end.fail(load=load(at, "llama", models["llama"], context_tokens=CONTEXT, no_such_option=1))
        assert not failed.model_at_fault and "no_such_option" in failed.reason
        failed = await end.fail(load=load(at, "nobody", models["llama"], context_tokens=CONTEXT))
        assert not failed.model_at_fault and "not_booked" in failed.reason
        # The same folder, whole again: nothing of it was remembered.
        shutil.rmtree(folder)
        shutil.copytree(models["llama"], folder)
        await end.hold(load(at, "llama", folder, context_tokens=CONTEXT))
        end.ask("whole", prompts[0], NEW_TOKENS, ignore_eos=True)
        assert (await end.answer("whole")).tokens == said["llama"][0]


@pytest.mark.parametrize(
    ("architecture", "change", "why", "at_fault"),
    [
        ("NemotronHForCausalLM", {"chunk_size": 0}, "ZeroDivisionError", True),  # as the model is built
        ("DeepseekV3ForCausalLM", {"n_group": 3}, "RuntimeError", False),  # at its first request
    ],
)
async def test_error_of_any_type_in_a_load_is_told_and_the_engine_takes_the_next(
    tmp_path: Path,
    engines: Engines,
    models: dict[str, Path],
    prompts: list[list[int]],
    said: dict[str, list[list[int]]],
    architecture: str,
    change: dict[str, int],
    why: str,
    at_fault: bool,
) -> None:
    folder = small_checkpoints.write(architecture, tmp_path / "broken")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | change))
    async with node(tmp_path) as at, engines.one() as end:
        await at.book("llama")
        end.send(load=load(at, "llama", folder, context_tokens=64))
        await end.hear("weights_mapped")
        failed = (await end.hear("failed")).failed
        assert why in failed.reason and "\n" not in failed.reason
        assert (failed.model_at_fault, failed.may_pass) == (at_fault, not at_fault)
        assert await at.leased_bytes() == 0
        await end.hold(load(at, "llama", models["llama"], context_tokens=CONTEXT))
        end.ask("whole", prompts[0], NEW_TOKENS, ignore_eos=True)
        assert (await end.answer("whole")).tokens == said["llama"][0]


async def test_requests_end_by_length_stop_or_abort_and_drain_hands_back_the_rest(
    tmp_path: Path,
    engines: Engines,
    models: dict[str, Path],
    prompts: list[list[int]],
    said: dict[str, list[list[int]]],
    motion: Motion,
) -> None:
    async with node(tmp_path) as at, engines.one() as end:
        await at.book("llama")
        end.ask("early", prompts[0], 4)
        assert (await end.answer("early")).error == "not serving"
        await end.hold(load(at, "llama", models["llama"], context_tokens=CONTEXT))
        assert "is active" in (await end.fail(load=load(at, "llama", models["llama"], context_tokens=CONTEXT))).reason
        assert "is active" in (await end.fail(wake=engine_pb2.Wake())).reason

        # Commands on each other's heels: none is lost when the model leaves, or comes, between them.
        end.send(unload=engine_pb2.Unload())
        first = end.send(load=load(at, "llama", models["llama"], context_tokens=CONTEXT))
        second = end.send(unload=engine_pb2.Unload())
        third = end.send(load=load(at, "llama", models["llama"], context_tokens=CONTEXT))
        await end.hear("done")
        await end.hear("weights_mapped")
        assert (await end.hear("failed")).failed.command_id == first
        assert (await end.hear("done")).done.command_id == second
        await end.hear("weights_mapped")
        assert (await end.hear("done")).done.command_id == third

        await _impossible_requests(end)
        await _logprobs(end, models["llama"], prompts[1])
        await _seeds(end, prompts[2])
        await _stop_tokens(end, prompts[3], said["llama"][3])
        penalized = await _penalties(end, "sync", prompts[8], said["llama"][8])

        # A prompt that fills the context but for one token.
        long = [2 + i % 1000 for i in range(CONTEXT - 1)]
        end.ask("full", long, 0)
        answer = await end.answer("full")
        assert len(answer.tokens) == 1 and answer.finish == common_pb2.LENGTH

        motion.slow()  # so that all of them run yet
        for i in range(3):
            end.ask(f"r{i}", prompts[i], 450 - len(prompts[i]), ignore_eos=True)
        end.ask("r10", prompts[3], NEW_TOKENS, ignore_eos=True)
        await end.until(lambda: all(end.answers[f"r{i}"].tokens for i in (0, 1, 2)))
        end.send(abort=engine_pb2.Abort(request_id="r1"))
        end.send(abort=engine_pb2.Abort(request_id="nobody"))
        assert (await end.answer("r1")).finish == common_pb2.ABORTED
        motion.free()
        assert (await end.answer("r10")).tokens == said["llama"][3], "an abort ends one request, not those it begins"
        motion.still()
        for i in (3, 4):
            end.ask(f"r{i}", prompts[i], NEW_TOKENS, ignore_eos=True)
            await end.until(lambda i=i: len(end.answers[f"r{i}"].tokens) > 0)
        assert "requests run" in (await end.fail(hibernate=engine_pb2.Hibernate())).reason

        await end.do(drain=engine_pb2.Drain(finish_ms=0))
        motion.free()
        for name in ("r3", "r4"):
            answer = await end.answer(name)
            assert (answer.finish, answer.error) == (common_pb2.FAILED, "handed back") and answer.tokens
        end.ask("late", prompts[0], 4)
        assert (await end.answer("late")).error == "not serving"
        await end.do(unload=engine_pb2.Unload())
        await end.hold(load(at, "llama", models["llama"], context_tokens=CONTEXT, overlap=1))
        assert await _penalties(end, "overlapped", prompts[8], said["llama"][8]) == penalized
        assert await end.close() == 0
