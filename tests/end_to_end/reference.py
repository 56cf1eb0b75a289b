"""What Transformers itself says: the greedy continuation of a prompt by `generate`, or its embedding, in a
process of its own (torch and Transformers stay out of the test's)."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from pathlib import Path

_PROGRAM = """
import json, sys, torch
from transformers import AutoModelForCausalLM
torch.set_num_threads(1)
said, new, embeds = {}, int(sys.argv[2]), sys.argv[3] == "embeds"
for path, prompts in json.loads(sys.argv[1]).items():
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    out, vectors = [], []
    with torch.inference_mode():
        for prompt in prompts:
            ids = torch.tensor([prompt])
            done = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=new)
            out.append(done[0, len(prompt):].tolist())
            if not embeds:
                continue
            state = model.base_model(ids).last_hidden_state[0, -1]
            vectors.append(torch.nn.functional.normalize(state, dim=0).tolist())
    said[path] = out, vectors
print("REFERENCE" + json.dumps(said))
"""


async def greedy(path: Path, prompts: list[list[int]], new: int) -> list[list[int]]:
    """Tokens after each prompt, at most `new`, with the end-of-sequence token if it came."""
    return (await _said({path: prompts}, new, "generates"))[path][0]


async def both(prompts: dict[Path, list[list[int]]], new: int) -> dict[Path, tuple[list[list[int]], list[list[float]]]]:
    """The same of several models, and each prompt's embedding: the state of its last token, of length 1."""
    return await _said(prompts, new, "embeds")


async def _said(
    prompts: dict[Path, list[list[int]]], new: int, what: str
) -> dict[Path, tuple[list[list[int]], list[list[float]]]]:
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-c",
        _PROGRAM,
        json.dumps({str(path): each for path, each in prompts.items()}),
        str(new),
        what,
        stdout=asyncio.subprocess.PIPE,
        env={**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
    )
    out, _ = await process.communicate()
    line = next(line for line in out.decode().splitlines() if line.startswith("REFERENCE"))
    return {Path(path): (tokens, vectors) for path, (tokens, vectors) in json.loads(line[len("REFERENCE") :]).items()}
