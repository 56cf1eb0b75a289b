"""An engine process for `engine_step.py`: ours or the reference's, without a forward pass, with a clock on every step.

Both sides are changed in the same way, and in nothing else. The forward pass gives constant logits. Slots on pages,
which a GPU's kernels choose, are chosen by numpy: SGLang's own function for hosts is a Python loop over requests.

As each step begins, these are noted, and written to the file `STEP_LOG` as the process ends: the clock, the main
thread's CPU time, the process's CPU time (all ns), how many requests the step has, and whether it is a prefill.
"""

from __future__ import annotations

import argparse
import atexit
import os
import time
from array import array
from pathlib import Path
from typing import Any

import numpy as np

from gpu_scheduler.engines.sglang.base import environment

SIDE_VARIABLE = "STEP_SIDE"
LOG_VARIABLE = "STEP_LOG"
PROFILE_VARIABLE = "STEP_PROFILE"
"""A file for what cProfile finds in the main thread, if it is set."""
SIDES = ("elastic", "reference")
COLUMNS = ("clock_ns", "thread_ns", "process_ns", "requests", "prefill")


def install() -> None:
    """After SGLang was imported and hooked, before its Scheduler is made."""
    _without_forward()
    _pages_by_numpy()
    _with_clock()


def _without_forward() -> None:
    import torch
    from sglang.srt.layers.logits_processor import LogitsProcessorOutput
    from sglang.srt.model_executor.model_runner import ModelRunner, ModelRunnerOutput

    def forward(runner: Any, batch: Any, **_: Any) -> Any:
        logits = torch.zeros(batch.batch_size, runner.model_config.vocab_size)
        logits[:, 7] = 1.0
        return ModelRunnerOutput(LogitsProcessorOutput(next_token_logits=logits), can_run_graph=False)

    ModelRunner.forward = forward


def _slots(before: Any, after: Any, last: Any, pages: Any, out: Any, size: int) -> None:
    """Slots of tokens `before`..`after` of each request: what is left of its last page, then new pages."""
    counts = after - before
    ends = np.cumsum(counts)
    row = np.repeat(np.arange(len(counts)), counts)
    position = np.arange(ends[-1]) - np.repeat(ends - counts - before, counts)
    have = (before + size - 1) // size
    new = (after + size - 1) // size - have
    first = np.cumsum(new) - new
    page = position // size - have[row]
    fresh = pages[np.maximum(page + first[row], 0)] * size + position % size if len(pages) else position
    out[:] = np.where(page < 0, last[row] + 1 + position - before[row], fresh)


def _pages_by_numpy() -> None:
    """Has both allocators compute slots in numpy, in place of SGLang's functions for hosts."""
    from sglang.srt.mem_cache.allocator import paged

    from gpu_scheduler.engines.sglang.kv.pools import paged_allocator as ours

    def extend(before: Any, after: Any, last: Any, pages: Any, out: Any, size: int, _device: Any) -> None:
        _slots(before.numpy(), after.numpy(), last.numpy(), pages.numpy(), out.numpy(), size)

    def decode(after: Any, last: Any, pages: Any, out: Any, size: int, _new: int) -> None:
        lengths = after.numpy()
        _slots(lengths - 1, lengths, last.numpy(), pages.numpy(), out.numpy(), size)

    for module in (paged, ours):
        vars(module).update(alloc_extend_naive=extend, alloc_decode_naive=decode)


def _with_clock() -> None:
    from sglang.srt.managers.scheduler import Scheduler

    steps = array("q")
    run_batch = Scheduler.run_batch

    def timed(scheduler: Any, batch: Any, *rest: Any) -> Any:
        steps.extend(
            (
                time.monotonic_ns(),
                time.thread_time_ns(),
                time.process_time_ns(),
                len(batch.reqs),
                batch.forward_mode.is_extend(),
            )
        )
        return run_batch(scheduler, batch, *rest)

    Scheduler.run_batch = timed
    atexit.register(lambda: Path(os.environ[LOG_VARIABLE]).write_bytes(steps.tobytes()))
    if path := os.environ.get(PROFILE_VARIABLE):
        _profile(path)


def _profile(path: str) -> None:
    import cProfile

    profile = cProfile.Profile()
    profile.enable()

    def end() -> None:
        profile.disable()
        profile.dump_stats(path)

    atexit.register(end)


def _elastic(arguments: list[str] | None = None) -> None:
    from gpu_scheduler.engines.sglang.__main__ import main

    def open_memory(load: Any, options: Any, ranks: Any) -> Any:
        from gpu_scheduler.engines.sglang.memory import on_balloond

        install()
        return on_balloond.open_memory(load, options, ranks)

    main(arguments, open_memory)


def _reference() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--channel-fd", type=int, required=True)
    parser.add_argument("--log-level")
    given = parser.parse_args()
    environment.die_with_parent()
    environment.prepare()
    # SGLang finds our plugin here as well; without this it does nothing.
    del os.environ[environment.ENGINE_VARIABLE]

    from benchmarks.gpu import stock_model, stock_scheduler

    arguments = stock_model.sglang_arguments

    def with_pages(load: Any) -> dict[str, Any]:
        install()
        return {**arguments(load), "page_size": int(load.options["page_size"])}

    stock_model.sglang_arguments = with_pages
    stock_scheduler.run(given.channel_fd)


if __name__ == "__main__":
    if os.environ[SIDE_VARIABLE] == "elastic":
        _elastic()
    else:
        _reference()
