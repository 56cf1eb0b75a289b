"""`python -m testing.fuzz.peer handoff|keeper PATH SEED CASES WORDS`: fuzzes a socket from a process of its own.

What it was granted ends with it, as memory of an engine does.
"""

from __future__ import annotations

import asyncio
import json
import random
import sys

import services.ipc.forking  # noqa: F401  (before grpc: this starts processes)
from testing.fuzz import sockets
from testing.fuzz.mutate import Mutator
from testing.fuzz.outcome import SurfaceOutcome

_SURFACES = {"handoff": sockets.fuzz_handoff, "keeper": sockets.fuzz_keeper}


async def run(
    surface: str, path: str, seed: int, cases: int, words: dict[str, list[str]], outcome: SurfaceOutcome
) -> None:
    """From a new process; adds what it tells."""
    arguments = (surface, path, str(seed), str(cases), json.dumps(words))
    child = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "testing.fuzz.peer", *arguments, stdout=asyncio.subprocess.PIPE
    )
    told, _ = await child.communicate()
    if child.returncode:
        outcome.fault(f"the fuzzing of {surface} ended with {child.returncode}")
        return
    outcome.merge(SurfaceOutcome.of_json(json.loads(told)))


def main() -> None:
    surface, path, seed, cases, words = sys.argv[1:]
    outcome = SurfaceOutcome()
    mutator = Mutator(random.Random(int(seed)), json.loads(words))
    asyncio.run(_SURFACES[surface](path, mutator, int(cases), outcome))
    print(json.dumps(outcome.as_json()))


if __name__ == "__main__":
    main()
