"""What Transformers itself says: the greedy continuation of a prompt by `generate`, its embedding, or how likely its
tokens are, in a process of its own (torch and Transformers stay out of the test's)."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from pathlib import Path
from typing import NamedTuple

_PROGRAM = """
import json, sys, torch
from transformers import AutoModelForCausalLM
torch.set_num_threads(1)
said, most, everything = {}, json.loads(sys.argv[2]), sys.argv[3] == "everything"
for path, prompts in json.loads(sys.argv[1]).items():
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    out, vectors, likely = [], [], []
    with torch.inference_mode():
        for prompt, new in zip(prompts, [most] * len(prompts) if isinstance(most, int) else most, strict=True):
            ids = torch.tensor([prompt])
            done = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=new)
            out.append(done[0, len(prompt):].tolist())
            if not everything:
                continue
            state = model.base_model(ids).last_hidden_state[0, -1]
            vectors.append(torch.nn.functional.normalize(state, dim=0).tolist())
            rows = torch.log_softmax(model(ids).logits[0, :-1], dim=-1)
            likely.append(list(zip(rows.gather(1, ids[0, 1:, None])[:, 0].tolist(), rows.max(dim=-1).values.tolist())))
    said[path] = out, vectors, likely
print("REFERENCE" + json.dumps(said))
"""


async def greedy(path: Path, prompts: list[list[int]], new: int | list[int]) -> list[list[int]]:
    """Tokens after each prompt, at most `new`, or `new` of its own for each, with the end-of-sequence token if it
    came."""
    return (await _said({path: prompts}, new, "tokens"))[path].tokens


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
    return await _said(prompts, new, "everything")


async def _said(prompts: dict[Path, list[list[int]]], new: int | list[int], what: str) -> dict[Path, Said]:
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-c",
        _PROGRAM,
        json.dumps({str(path): each for path, each in prompts.items()}),
        json.dumps(new),
        what,
        stdout=asyncio.subprocess.PIPE,
        env={**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
    )
    out, _ = await process.communicate()
    line = next(line for line in out.decode().splitlines() if line.startswith("REFERENCE"))
    return {Path(path): Said(*said) for path, said in json.loads(line[len("REFERENCE") :]).items()}
