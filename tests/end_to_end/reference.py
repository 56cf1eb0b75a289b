"""What Transformers itself says: the greedy continuation of a prompt by `generate`, its embedding, or how likely its
tokens are. It says so in a thread, beside the start of what is compared with it."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import torch

from tests.gpu_scheduler.engines.sglang.checkpoints import one_thread


async def greedy(path: Path, prompts: list[list[int]], new: int | list[int]) -> list[list[int]]:
    """Tokens after each prompt, at most `new`, or `new` of its own for each, with the end-of-sequence token if it
    came."""
    return (await _said({path: prompts}, new, all_of_it=False))[path].tokens


class Said(NamedTuple):
    """Of each prompt of one model."""

    tokens: list[list[int]]
    """As `greedy`."""
    embeddings: list[list[float]]
    """The state of its last token, of length 1; none where only tokens were asked for."""
    likely: list[list[tuple[float, float]]]
    """For each token but the first, its log-probability and that of the most likely one."""


async def everything(prompts: dict[Path, list[list[int]]], new: int) -> dict[Path, Said]:
    """All that there is to say of prompts of several models."""
    return await _said(prompts, new, all_of_it=True)


async def _said(prompts: Mapping[Path, list[list[int]]], new: int | list[int], all_of_it: bool) -> dict[Path, Said]:
    def say() -> dict[Path, Said]:
        with one_thread():
            return {path: _say(path, each, new, all_of_it) for path, each in prompts.items()}

    return await asyncio.to_thread(say)


@torch.inference_mode()
def _say(path: Path, prompts: list[list[int]], new: int | list[int], all_of_it: bool) -> Said:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    said = Said([], [], [])
    for prompt, most in zip(prompts, [new] * len(prompts) if isinstance(new, int) else new, strict=True):
        ids = torch.tensor([prompt])
        done = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=most)
        said.tokens.append(done[0, len(prompt) :].tolist())
        if not all_of_it:
            continue
        state = model.base_model(ids).last_hidden_state[0, -1]
        said.embeddings.append(torch.nn.functional.normalize(state, dim=0).tolist())
        rows = torch.log_softmax(model(ids).logits[0, :-1], dim=-1)
        own, best = rows.gather(1, ids[0, 1:, None])[:, 0], rows.max(dim=-1).values
        said.likely.append(list(zip(own.tolist(), best.tolist(), strict=True)))
    return said
