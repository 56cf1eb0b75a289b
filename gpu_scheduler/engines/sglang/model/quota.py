"""Device memory that a process may take beside its leases: measured at its peak, booked, and enforced.

Imports SGLang: only the engine process may import this.
"""

from __future__ import annotations

from typing import Any

import torch

from gpu_scheduler.engines.sglang.base import device
from gpu_scheduler.engines.sglang.base.errors import NoMemory
from gpu_scheduler.engines.sglang.base.options import one_line
from gpu_scheduler.engines.sglang.memory.graph_memory import GraphMemory
from gpu_scheduler.engines.sglang.sampling import sampling
from gpu_scheduler.engines.sglang.sampling.limits import SamplingLimits
from services.telemetry import log

_log = log.get(__name__)


def draw_most(scheduler: Any, rows: int) -> None:
    """Allocates what drawing tokens for the largest batch takes, with log-probabilities for all its requests; those of
    as many tokens of a prompt take no more. `rows`: requests, or tokens. Raises NoMemory."""
    stream = scheduler.forward_stream if scheduler.enable_overlap else torch.cuda.current_stream()
    vocabulary = int(scheduler.model_config.vocab_size)
    try:
        with torch.cuda.stream(stream):
            _draw(rows, vocabulary, torch.device("cuda", torch.cuda.current_device()))
        stream.synchronize()
    except torch.OutOfMemoryError as error:
        raise NoMemory(f"the device has no memory for drawing tokens of {rows} requests: {one_line(error)}") from None
    except RuntimeError as error:  # the measured peak is then a little too low
        _log.warning("drawing was not measured", why=one_line(error))


def _draw(rows: int, vocabulary: int, where: torch.device) -> None:
    logits = torch.zeros(rows, vocabulary, dtype=torch.float32, device=where)
    told = torch.log_softmax(logits, dim=-1)
    logits[:] = torch.softmax(logits, dim=-1)
    seeds = torch.zeros(rows, dtype=torch.int64, device=where)
    ones = torch.ones(rows, device=where)
    # All kinds of limits, because kernels are compiled when they are first launched.
    for limits in (None, SamplingLimits(ones.int(), ones), SamplingLimits(ones.int(), ones, ones)):
        sampling.draw(logits, seeds, seeds, limits)
    del told


def enforce(where: torch.device, nbytes: int, graphs: GraphMemory | None) -> None:
    """Limits torch to `nbytes` beside the graphs' memory, since it counts its pools over our ranges as its own."""
    device.allow(where, nbytes + (graphs.taken_bytes if graphs is not None else 0))


def lift(where: torch.device) -> None:
    """Removes the limit on torch."""
    device.allow(where, None)
