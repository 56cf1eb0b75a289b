"""What a model leaves behind in SGLang's own memory of a process."""

from __future__ import annotations

import pytest

from tests.gpu_scheduler.engines.sglang.forks import Imported

pytestmark = pytest.mark.sglang
SCRIPT = """
import torch
from sglang.srt.layers.rotary_embedding import factory
from sglang.srt.model_executor.graph_shared_output import GraphSharedOutput
from sglang.srt.model_executor.input_buffers import share_input_buffer
from sglang.srt.model_executor.runner_utils.pool import get_global_graph_memory_pool, set_global_graph_memory_pool
from gpu_scheduler.engines.sglang.forget import forget

stale = share_input_buffer("out_cache_loc", torch.full((4,), 77))
factory._ROPE_DICT[("a", "shape")] = object()
set_global_graph_memory_pool((1, 2))
GraphSharedOutput._process_shared = object()
assert share_input_buffer("out_cache_loc", torch.zeros(4, dtype=torch.int64)).tolist() == [77] * 4
forget()
assert share_input_buffer("out_cache_loc", torch.zeros(4, dtype=torch.int64)).tolist() == [0] * 4
assert not factory._ROPE_DICT
assert GraphSharedOutput._process_shared is None
assert get_global_graph_memory_pool() is None
"""


def test_the_next_model_finds_neither_slots_nor_tables_nor_graph_memory_of_the_last(imported: Imported) -> None:
    imported.run(SCRIPT)
