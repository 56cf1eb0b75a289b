"""Asking a server by `sglang.bench_serving`: a load as its arguments, what is kept of its result, and its process."""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from math import inf, isfinite
from pathlib import Path
from typing import Any

from benchmarks.gpu import stock_server

_KEPT = (
    *("completed", "duration", "request_throughput", "output_throughput", "max_concurrent_requests"),
    *(f"{of}_{what}_ms" for what in ("ttft", "tpot", "itl") for of in ("mean", "median", "p90", "p99")),
    "mean_e2e_latency_ms",
)

_READY_S = 10
"""For a server that has been up before; with none bench_serving would wait a minute."""


@dataclass(frozen=True)
class Load:
    """What a window asks."""

    name: str
    rate: float
    """Requests per second; infinite: all at once."""
    requests: int
    second: bool = False
    """Whether another model is awake in Prism."""

    @property
    def asking_s(self) -> float:
        """Until the last request is sent, in the mean."""
        return self.requests / self.rate if isfinite(self.rate) else 0.0


def load(name: str, window_s: float) -> Load:
    """By its name, of so many seconds. Raises ValueError."""
    what, plus, beside = name.partition("+")
    if plus and beside != "second":
        raise ValueError(f"{name}: after a plus comes `second`")
    if what.startswith("x"):
        return Load(name, inf, int(what[1:]), bool(plus))
    rate = float(what)
    if not (isfinite(rate) and rate > 0):
        raise ValueError(f"{name}: a rate is above 0")
    return Load(name, rate, max(1, round(rate * window_s)), bool(plus))


def arguments(
    base: str, model: str, folder: Path, at: Load, lengths: tuple[int, int], seed: int, to: Path
) -> list[str]:
    """Of bench_serving, for a model that is served at `base` and whose tokenizer is in `folder`: a load of prompts and
    answers of these lengths, drawn by `seed`, and the file of its result. It is OpenAI's completions that it asks for,
    by the code that it has for vLLM: its code for SGLang also asks for what only SGLang has."""
    tokens_in, tokens_out = lengths
    return [
        *("--backend", "vllm", "--base-url", base, "--model", str(folder), "--served-model-name", model),
        *("--tokenizer", str(folder), "--dataset-name", "random-ids", "--random-range-ratio", "1.0"),
        *("--random-input-len", str(tokens_in), "--random-output-len", str(tokens_out)),
        *("--num-prompts", str(at.requests), "--request-rate", str(at.rate), "--seed", str(seed)),
        *("--ready-check-timeout-sec", str(_READY_S), "--warmup-requests", "0", "--disable-tqdm"),
        *("--output-details", "--output-file", str(to)),
    ]


def result(text: str) -> dict[str, Any]:
    """What is kept of a file that bench_serving wrote. Raises ValueError where it holds no result."""
    lines = [line for line in text.splitlines() if line.strip()]
    if not lines:
        raise ValueError("bench_serving wrote no result")
    told = json.loads(lines[-1])
    errors = [error.strip().splitlines()[-1] for error in told["errors"] if error.strip()]
    answered = [
        (1e3 * ttft, 1e3 * sum(gaps) / (tokens - 1))
        for ttft, gaps, tokens, error in zip(
            told["ttfts"], told["itls"], told["output_lens"], told["errors"], strict=True
        )
        if not error and tokens > 1
    ]
    return {
        **{key: told[key] for key in _KEPT},
        "failed": len(told["errors"]) - told["completed"],
        "errors": errors[:3],
        "longest_gap_ms": round(1e3 * max((gap for gaps in told["itls"] for gap in gaps), default=0.0), 2),
        "ttft_ms": [round(ttft, 2) for ttft, _ in answered],
        "tpot_ms": [round(tpot, 3) for _, tpot in answered],
    }


class Client:
    """`bench_client`'s process."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process

    async def told(self, limit_s: float) -> dict[str, Any]:
        """Its next line. Raises RuntimeError where it ended, TimeoutError."""
        assert self.process.stdout is not None
        async with asyncio.timeout(limit_s):
            line = await self.process.stdout.readline()
        if not line:
            raise RuntimeError("the client of the benchmark ended")
        return dict(json.loads(line))

    async def ask(self, said: Sequence[str], to: Path, limit_s: float) -> dict[str, Any]:
        """What came of bench_serving with these arguments: its exit status and its seconds of a core. What it prints
        goes to a log. Raises RuntimeError, TimeoutError."""
        assert self.process.stdin is not None
        line = json.dumps({"arguments": list(said), "log": str(to), "limit_s": limit_s}) + "\n"
        self.process.stdin.write(line.encode())
        return await self.told(limit_s + 10.0)


@contextlib.asynccontextmanager
async def client(folder: Path, to: Path) -> AsyncIterator[Client]:
    """Started; it is ready after its first line."""
    pipe = asyncio.subprocess.PIPE
    with open(to, "ab") as errors:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-W", "ignore", "-m", "benchmarks.gpu.bench_client", str(folder)),
            stdin=pipe,
            stdout=pipe,
            stderr=errors,
            env=stock_server.server_environment({"TOKENIZERS_PARALLELISM": "false"}),
        )
    try:
        yield Client(process)
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()
