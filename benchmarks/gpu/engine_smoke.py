"""One SGLang engine on a GPU with memory from balloond: does it serve, give memory up, come back, and say the same?

    python -m benchmarks.gpu.engine_smoke --device cuda:0 [--shape 1b] [--out DIR]

Without a shape the three trained example models, in turn in one process; with one, random weights. Prompts go one by
one, then all at once while the limit moves, then once more one by one: the first and the last must be equal, token for
token. Prints one JSON object; `failures` should be empty.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.gpu import shapes
from testing.engines import harness

ROOT = Path(__file__).resolve().parents[2]
MIB = 1 << 20
NEW_TOKENS = 48


def prompts(vocabulary: int, count: int, longest: int) -> list[list[int]]:
    """Uneven lengths; every third begins like the one before it."""
    chance = random.Random(11)
    made: list[list[int]] = []
    for i in range(count):
        own = [chance.randrange(3, vocabulary) for _ in range(chance.randrange(5, longest))]
        made.append(made[-1][: len(made[-1]) // 2] + own if i % 3 == 2 else own)
    return [prompt[:longest] for prompt in made]


async def ask(end: harness.EngineEnd, tag: str, asked: list[list[int]], together: bool) -> list[list[int]]:
    answers = []
    for i, prompt in enumerate(asked):
        end.ask(f"{tag}-{i}", prompt, NEW_TOKENS, ignore_eos=True)
        if not together:
            await end.answer(f"{tag}-{i}")
    for i in range(len(asked)):
        answer = await end.answer(f"{tag}-{i}")
        if answer.error or answer.parked:
            raise RuntimeError(f"{tag}-{i}: {answer.error or 'parked'}")
        answers.append(answer.tokens)
    return answers


async def one(
    at: harness.Node, end: harness.EngineEnd, name: str, path: Path, options: dict[str, int]
) -> dict[str, Any]:
    found: dict[str, Any] = {"model": name}
    config = json.loads((path / "config.json").read_text())
    await at.book(name, floor_bytes=256 * MIB, weights_bytes=shapes.weights_bytes(config))
    begun = time.monotonic()
    mapped, measured = await end.hold(harness.load(at, name, path, context_tokens=2048, **options))
    found["load_s"] = time.monotonic() - begun
    found["measured"] = {field.name: value for field, value in measured.ListFields()}
    asked = prompts(min(config["vocab_size"], 30000), 24, 900)

    before = await ask(end, "alone", asked, together=False)
    begun = time.monotonic()
    together = await ask(end, "together", asked, together=True)
    found["together_s"] = time.monotonic() - begun
    found["together_equal"] = sum(a == b for a, b in zip(before, together, strict=True))

    async def move() -> None:
        chance = random.Random(3)
        while True:
            await at.limit(name, chance.choice([256, 320, 512, 4096]) * MIB)
            await asyncio.sleep(0.2)

    mover = asyncio.get_running_loop().create_task(move())
    begun = time.monotonic()
    for turn in range(4):
        await ask(end, f"moving-{turn}", asked, together=True)
    found["moving_s"] = (time.monotonic() - begun) / 4
    mover.cancel()
    await at.limit(name, 256 * MIB)
    await end.until(lambda: 0 < end.stats.kv_held_bytes <= 256 * MIB)
    await at.limit(name, 16384 * MIB)
    after = await ask(end, "after", asked, together=False)
    found["stats"] = {field.name: value for field, value in end.stats.ListFields()}
    found["after_equal"] = sum(a == b for a, b in zip(before, after, strict=True))
    found["asked"] = len(asked)
    begun = time.monotonic()
    await end.do(hibernate=harness.engine_pb2.Hibernate())
    found["hibernate_s"] = time.monotonic() - begun
    found["leased_after_hibernate"] = await at.leased_bytes()
    begun = time.monotonic()
    end.send(wake=harness.engine_pb2.Wake())
    again = (await end.hear("weights_mapped")).weights_mapped
    found["wake_mapped_s"] = time.monotonic() - begun
    assert again.manifest == mapped.manifest
    return found


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--shape", choices=shapes.NAMES)
    parser.add_argument("--capacity-gib", type=int, default=60)
    parser.add_argument("--options", default="{}", help="engine options as JSON")
    given = parser.parse_args()
    options = json.loads(given.options)
    results: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        models = {path.parent.name: path.parent for path in sorted(ROOT.glob("examples/models/*/config.json"))}
        if given.shape:
            models = {given.shape: shapes.write(folder / given.shape, given.shape)}
            options["random_weights"] = 1
        async with harness.node(folder, given.capacity_gib << 30, given.device) as at:
            for name, path in models.items():
                async with harness.engine() as end:
                    try:
                        results.append(await one(at, end, name, path, options))
                    except BaseException as error:
                        print(f"{name}: {type(error).__name__}: {error}", file=sys.stderr)
                        results.append({"model": name, "error": f"{type(error).__name__}: {error}"})
    print(json.dumps(results, indent=1, default=str))


if __name__ == "__main__":
    asyncio.run(main())
