"""Capturing in memory of ours, and in ordinary memory when that fails; what captures is a stand-in."""

from __future__ import annotations

import pytest

from tests.gpu_scheduler.engines.sglang.forks import Imported

pytestmark = pytest.mark.sglang
SCRIPT = """
from contextlib import contextmanager
from types import SimpleNamespace
import torch
from sglang.srt.model_executor import input_buffers
from sglang.srt.model_executor.runner_utils.pool import get_global_graph_memory_pool, set_global_graph_memory_pool
from gpu_scheduler.engines.sglang.base import current
from gpu_scheduler.engines.sglang.hooks import graphs as hooks_graphs

class Graphs:
    @contextmanager
    def capturing(self):
        yield (0, 7)

    @contextmanager
    def scratch(self):
        global in_scratch
        in_scratch = True
        yield
        in_scratch = False

in_scratch, zeros = False, torch.zeros_like
def zeros_like(tensor):
    made_in_scratch.append(in_scratch)
    return zeros(tensor)
torch.zeros_like = zeros_like

class Served:
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

table = torch.zeros(4, 8, dtype=torch.int32)
runner = SimpleNamespace(
    graph_shared_output=SimpleNamespace(_logits_buffers={}), req_to_token_pool=SimpleNamespace(req_to_token=table)
)
for fails in (False, True):
    captured_in, made_in_scratch, before = [], [], table.untyped_storage()
    model = Served()
    current.set_model(model)
    assert hooks_graphs.capture_all(capture, model_runner=runner, capture_decode_cuda_graph=True) == "runner"
    assert captured_in == ([(0, 7), None] if fails else [(0, 7)]), captured_in
    assert (model.graphs is None, bool(model.why)) == (fails, fails)
    assert not runner.graph_shared_output._logits_buffers and not input_buffers._forward_input_buffer_pool
    # Whoever has the table has it where it is now: in memory of the graphs, or out of it again.
    assert made_in_scratch == ([True, False] if fails else [True]), made_in_scratch
    assert runner.req_to_token_pool.req_to_token is table
    assert table.untyped_storage().data_ptr() != before.data_ptr()
    set_global_graph_memory_pool(None)
"""


def test_graphs_that_cannot_be_captured_in_memory_that_leaves_are_captured_in_ordinary_memory(
    imported: Imported,
) -> None:
    imported.run(SCRIPT)


BUFFERS = """
from contextlib import contextmanager
from types import SimpleNamespace
import torch
from gpu_scheduler.engines.sglang.base import current
from gpu_scheduler.engines.sglang.hooks import graphs as hooks_graphs

entered = []
@contextmanager
def scratch():
    entered.append(1)
    yield

embeds, ids = torch.zeros(2, 3), torch.ones(2)
def share(buffers, name, buffer):
    return buffer
current.set_model(SimpleNamespace(graphs=SimpleNamespace(scratch=scratch)))
assert hooks_graphs.input_buffer(share, None, "seq_lens", ids) is ids and not entered
shared = hooks_graphs.input_buffer(share, None, "input_embeds", embeds)
assert shared is not embeds and shared.equal(embeds) and entered == [1]
made = hooks_graphs.prefill_output(lambda backend, output, size: output.new_empty(size, 3), None, embeds, 5)
assert made.shape == (5, 3) and entered == [1, 1]
assert hooks_graphs.prefill_output(lambda backend, output, size: "several", None, (embeds, ids), 5) == "several"
assert entered == [1, 1]
current.set_model(SimpleNamespace(graphs=None))
assert hooks_graphs.input_buffer(share, None, "input_embeds", embeds) is embeds and entered == [1, 1]
"""


def test_graph_buffers_that_a_sleeping_model_does_not_need_are_in_memory_that_leaves(
    imported: Imported,
) -> None:
    imported.run(BUFFERS)


STREAMS = """
from types import SimpleNamespace
from sglang.srt.runtime_context import set_stream
from gpu_scheduler.engines.sglang.base import current
from gpu_scheduler.engines.sglang.hooks import graphs as hooks_graphs

prepared = []
current.set_model(SimpleNamespace(graphs=SimpleNamespace(prepare_streams=prepared.extend)))
set_stream("alt", "beside")
assert hooks_graphs.session(lambda backend, stream: (backend, stream), "full", "own") == ("full", "own")
assert prepared == ["own", "beside"], prepared
"""


def test_streams_that_a_graph_may_use_have_workspaces_in_memory_that_comes_back(imported: Imported) -> None:
    imported.run(STREAMS)
