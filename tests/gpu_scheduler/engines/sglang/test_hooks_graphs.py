"""Capturing in memory of ours, and in ordinary memory when that fails; what captures is a stand-in."""

from __future__ import annotations

import pytest

from tests.gpu_scheduler.engines.sglang.forks import Imported

pytestmark = pytest.mark.sglang
SCRIPT = """
from contextlib import contextmanager
from types import SimpleNamespace
from sglang.srt.model_executor import input_buffers
from sglang.srt.model_executor.runner_utils.pool import get_global_graph_memory_pool, set_global_graph_memory_pool
from gpu_scheduler.engines.sglang import current, hooks_graphs

class Graphs:
    @contextmanager
    def capturing(self):
        yield (0, 7)

class Instance:
    graphs = why = None
    def open_graphs(self):
        self.graphs = Graphs()
        return self.graphs
    def give_up_graphs(self, why):
        self.graphs, self.why = None, why

def capture(*, model_runner, capture_decode_cuda_graph):
    assert capture_decode_cuda_graph is True
    pool = get_global_graph_memory_pool()
    captured_in.append(pool)
    if pool is not None and fails:
        input_buffers._forward_input_buffer_pool["logits"] = 1
        model_runner.graph_shared_output._logits_buffers[1] = 2
        raise Exception("Capture cuda graph failed: out of memory")
    return "runner"

runner = SimpleNamespace(graph_shared_output=SimpleNamespace(_logits_buffers={}))
for fails in (False, True):
    captured_in = []
    instance = Instance()
    current.set_instance(instance)
    assert hooks_graphs.capture_all(capture, model_runner=runner, capture_decode_cuda_graph=True) == "runner"
    assert captured_in == ([(0, 7), None] if fails else [(0, 7)]), captured_in
    assert (instance.graphs is None, bool(instance.why)) == (fails, fails)
    assert not runner.graph_shared_output._logits_buffers and not input_buffers._forward_input_buffer_pool
    set_global_graph_memory_pool(None)
"""


def test_graphs_that_cannot_be_captured_in_memory_that_leaves_are_captured_in_ordinary_memory(
    imported: Imported,
) -> None:
    imported.run(SCRIPT)


STREAMS = """
from types import SimpleNamespace
from sglang.srt.runtime_context import set_stream
from gpu_scheduler.engines.sglang import current, hooks_graphs

prepared = []
current.set_instance(SimpleNamespace(graphs=SimpleNamespace(prepare_streams=prepared.extend)))
set_stream("alt", "beside")
assert hooks_graphs.session(lambda backend, stream: (backend, stream), "full", "own") == ("full", "own")
assert prepared == ["own", "beside"], prepared
"""


def test_every_stream_that_a_graph_may_use_has_its_workspace_in_memory_that_comes_back(imported: Imported) -> None:
    imported.run(STREAMS)
