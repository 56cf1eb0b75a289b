"""Capturing in memory of ours, and in ordinary memory when that fails; what captures is a stand-in."""

from __future__ import annotations

import ast
from importlib.util import find_spec
from pathlib import Path

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
    def __init__(self):
        self.tables = [pages]
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
        if shared is not None:
            shared._logits_buffers[1] = 2
        raise Exception("Capture cuda graph failed: out of memory")
    return "runner"

table, pages = torch.zeros(4, 8, dtype=torch.int32), torch.zeros(4, 8, dtype=torch.int32)
model_of_sglang = torch.nn.Linear(1, 1)
model_of_sglang.alt_stream = torch.Stream(stream_id=3, device_index=0, device_type=1)
buffers = SimpleNamespace(_logits_buffers={})
for fails, shared in ((False, buffers), (True, buffers), (True, None)):  # None: a model whose graphs share no buffer
    runner = SimpleNamespace(graph_shared_output=shared, req_to_token_pool=SimpleNamespace(req_to_token=table))
    runner.model = model_of_sglang
    captured_in, made_in_scratch, before, of_pages = [], [], table.untyped_storage(), pages.untyped_storage()
    model = Served()
    current.set_model(model)
    assert hooks_graphs.capture_all(capture, model_runner=runner, capture_decode_cuda_graph=True) == "runner"
    assert captured_in == ([(0, 7), None] if fails else [(0, 7)]), captured_in
    assert (model.graphs is None, bool(model.why)) == (fails, fails)
    assert fails or model.graphs.beside == [model_of_sglang.alt_stream]
    assert not buffers._logits_buffers and not input_buffers._forward_input_buffer_pool
    # Whoever has the table has it where it is now: in memory of the graphs, or out of it again.
    assert made_in_scratch == ([True, False, False] if fails else [True]), made_in_scratch
    assert fails == (pages.untyped_storage().data_ptr() != of_pages.data_ptr())
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
def share(name, buffer):
    return buffer
current.set_model(SimpleNamespace(graphs=SimpleNamespace(scratch=scratch, tables=(tables := []))))
assert hooks_graphs.input_buffer(share, "seq_lens", ids) is ids and not entered
shared = hooks_graphs.input_buffer(share, "input_embeds", embeds)
assert shared is not embeds and shared.equal(embeds) and entered == [1]
made = hooks_graphs.prefill_output(lambda backend, output, size: output.new_empty(size, 3), None, embeds, 5)
assert made.shape == (5, 3) and entered == [1, 1]
assert hooks_graphs.prefill_output(lambda backend, output, size: "several", None, (embeds, ids), 5) == "several"
assert entered == [1, 1]
table, lengths = torch.ones(4, 8, dtype=torch.int32), torch.ones(4)
metadata = {"page_table": table, "cache_seqlens": lengths}
before = table.untyped_storage(), lengths.untyped_storage()
hooks_graphs.page_tables(None, SimpleNamespace(decode_cuda_graph_metadata=metadata), 4, 4)
assert entered == [1, 1, 1] and metadata["page_table"] is table and not table.any()
assert len(tables) == 1 and tables[0] is table
assert table.untyped_storage().data_ptr() != before[0].data_ptr() and lengths.all()
assert lengths.untyped_storage().data_ptr() == before[1].data_ptr()
current.set_model(SimpleNamespace(graphs=None))
assert hooks_graphs.input_buffer(share, "input_embeds", embeds) is embeds and entered == [1, 1, 1]
"""


def test_graph_buffers_that_a_sleeping_model_does_not_need_are_in_memory_that_leaves(
    imported: Imported,
) -> None:
    imported.run(BUFFERS)


STREAMS = """
from types import SimpleNamespace
import torch
from sglang.srt.runtime_context import set_stream
from gpu_scheduler.engines.sglang.base import current
from gpu_scheduler.engines.sglang.hooks import graphs as hooks_graphs

prepared = []
current.set_model(SimpleNamespace(graphs=SimpleNamespace(prepare_streams=prepared.extend, beside=["model's"])))
set_stream("alt", "beside")
assert hooks_graphs.session(lambda backend, stream: (backend, stream), "full", "own") == ("full", "own")
assert prepared == ["own", "beside", "model's"], prepared
"""


def test_streams_that_a_graph_may_use_have_workspaces_in_memory_that_comes_back(imported: Imported) -> None:
    imported.run(STREAMS)


OWN_STREAMS = """
from types import SimpleNamespace
import torch
from sglang.srt.models import nemotron_h
from gpu_scheduler.engines.sglang.hooks.graphs import streams_of

def stream(number):
    return torch.Stream(stream_id=number, device_index=0, device_type=1)

layer = nemotron_h.NemotronHMoE.__new__(nemotron_h.NemotronHMoE)
torch.nn.Module.__init__(layer)
torch.cuda.Stream, real = lambda: stream(3), torch.cuda.Stream
made = nemotron_h._get_or_create_alt_stream(torch.cuda)  # what SGLang's experts do at their first step
torch.cuda.Stream = real
model = torch.nn.Sequential(torch.nn.Linear(1, 1), torch.nn.Linear(1, 1), layer)
model[0].alt_stream = model[1].alt_stream = stream(5)  # as DeepSeek's layers share theirs
model[1].alt_streams = [stream(7), None]
assert streams_of(model) == [made, model[0].alt_stream, model[1].alt_streams[0]]
assert streams_of(model)[0] is made
"""


def test_streams_that_a_model_made_for_itself_are_found(imported: Imported) -> None:
    imported.run(OWN_STREAMS)


def test_every_stream_of_sglangs_models_is_kept_where_it_is_found() -> None:
    package = find_spec("sglang")
    assert package is not None and package.submodule_search_locations
    models = Path(package.submodule_search_locations[0]) / "srt" / "models"
    served = ("deepseek_v2", "nemotron_h", "qwen3_5", "qwen3_next", "qwen2_moe", "glm4_moe", "gpt_oss", "minimax_m2")
    for name in served:
        tree = ast.parse((models / f"{name}.py").read_text())
        for statement in ast.walk(tree):
            if not isinstance(statement, (ast.Assign, ast.AnnAssign)) or "Stream()" not in ast.unparse(statement):
                continue
            target = statement.targets[0] if isinstance(statement, ast.Assign) else statement.target
            assert ast.unparse(target).startswith("self.") or ast.unparse(target) == "_alt_stream", (
                name,
                target.lineno,
            )
