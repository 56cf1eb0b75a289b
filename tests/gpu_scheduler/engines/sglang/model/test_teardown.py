"""What a model leaves behind in SGLang's own memory of a process."""

from __future__ import annotations

import pytest

from tests.gpu_scheduler.engines.sglang.forks import Imported

pytestmark = pytest.mark.sglang
SCRIPT = """
import torch
from sglang.kernels.ops.lora.dense import chunked_sgmv_expand, chunked_sgmv_shrink
from sglang.srt.layers.rotary_embedding import factory
from sglang.srt.model_executor.graph_shared_output import GraphSharedOutput
from sglang.srt.model_executor.input_buffers import share_input_buffer
from sglang.srt.model_executor.runner_utils.pool import get_global_graph_memory_pool, set_global_graph_memory_pool
from sglang.srt.utils.common import CachedKernel
from gpu_scheduler.engines.sglang.model.teardown import forget

assert chunked_sgmv_expand._chunked_lora_expand_kernel and chunked_sgmv_shrink._chunked_lora_shrink_kernel
kernels = [object.__new__(CachedKernel) for _ in range(2)]  # as on a GPU
for kernel in kernels:
    kernel.kernel_cache = {("sizes",): "for another rank"}
chunked_sgmv_expand._chunked_lora_expand_kernel, chunked_sgmv_shrink._chunked_lora_shrink_kernel = kernels
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
assert not any(kernel.kernel_cache for kernel in kernels)
"""

HELD = """
import gc, weakref
from types import SimpleNamespace
from gpu_scheduler.engines.sglang.model.teardown import take_apart

class Model:
    pass

class Backend:
    def __init__(self):
        self.graphs = {1: Model()}
    def cleanup(self):
        self.graphs.clear()

model, backend = Model(), Backend()
gone = [weakref.ref(model), weakref.ref(backend.graphs[1])]
runner = SimpleNamespace(model=model, decode_cuda_graph_runner=SimpleNamespace(backend=backend))
runner.prefill_cuda_graph_runner = SimpleNamespace(model_runner=runner)  # one that runs without graphs
held = SimpleNamespace(tp_worker=SimpleNamespace(model_runner=runner)), runner, backend
del model, runner
take_apart(held[0])
assert [each() for each in gone] == [None, None] and not vars(held[0])
"""

CACHED = """
import functools, gc, weakref
import torch
from gpu_scheduler.engines.sglang.model.teardown import forget

class Base(torch.nn.Module):
    @functools.lru_cache
    def sizes(self):
        return [4]

class Derived(Base):
    __module__ = "sglang.srt.models.some"

class Inner(torch.nn.Module):
    __module__ = "sglang.srt.layers.some"
    @functools.lru_cache
    def names(self):
        return ["a"]

Base.__module__ = "sglang.srt.models.base"
model = Derived()
model.inner = Inner()
assert model.sizes() and model.inner.names()
gone = [weakref.ref(model), weakref.ref(model.inner)]
forget()
del model
gc.collect()
assert [each() for each in gone] == [None, None]
"""

LEFT = """
from types import SimpleNamespace
import torch
from gpu_scheduler.engines.sglang.model.lifecycle import Lifecycle
from gpu_scheduler.engines.sglang.ranks.ranks import Alone

class Part:
    pass

def is_clean(strict, held):
    runner = SimpleNamespace(
        model=torch.nn.Linear(1, 1), attn_backend=Part(), req_to_token_pool=Part(), token_to_kv_pool=Part(),
        prefill_cuda_graph_runner=None, decode_cuda_graph_runner=None,
    )
    kept = vars(runner).get(held)
    backend = SimpleNamespace(close=lambda: None)
    scheduler = SimpleNamespace(
        tp_worker=SimpleNamespace(model_runner=runner), grammar_manager=SimpleNamespace(grammar_backend=backend)
    )
    model = SimpleNamespace(
        ranks=Alone(), device=torch.device("cpu"), strict=strict, clean=True, scheduler=scheduler,
        forget=lambda: None, close_graphs=lambda: None, memory=SimpleNamespace(close=lambda: None),
        options=SimpleNamespace(small_stack=0),
    )
    del runner, scheduler
    clean, _ = Lifecycle(model).close()
    return clean

for held in ("model", "attn_backend", "req_to_token_pool", "token_to_kv_pool"):
    assert not is_clean(True, held), held
    assert is_clean(False, held), held
assert is_clean(True, "")
"""

FORGOTTEN = """
from gpu_scheduler.engines.sglang.model.loaded_model import LoadedModel

made = ("scheduler", "server_args", "kv", "tree", "provisioning", "kv_transfer")
model = object.__new__(LoadedModel)
for name in (*made, "adapters", "_weights", "memory"):
    setattr(model, name, object())
model.forget()
assert not vars(model).keys() & set(made)
assert model.adapters is model._weights is None and model.memory is not None
del model.memory
model.forget()  # a load that failed has made some of it only
"""

FLUSHED = """
import gc, weakref
from types import SimpleNamespace
import torch
from gpu_scheduler.engines.sglang.model.teardown import prefixes
from tests.gpu_scheduler.engines.sglang.kv.trees import Slots, cache_over
from gpu_scheduler.engines.sglang.kv.prefix_tree import PrefixTree

gc.disable()  # and the first tree's root is settled
tree = cache_over(Slots(), 1)
prefixes_of = PrefixTree(tree)
gc.freeze()
scheduler = SimpleNamespace(tree_cache=tree, flush_cache=lambda: tree.reset() is None)
for turn in range(2):
    for tokens in ([1, 2, 3, 4], [1, 2, 5], [6]):
        slots = torch.arange(len(tokens))
        prefixes_of.insert(prefixes_of.key(tokens), slots, 0)
        del slots
    root = tree.root_node
    inner = next(node for node in root.children.values() if node.children)
    gone = [weakref.ref(node) for node in (*root.children.values(), *inner.children.values())]
    assert len(gone) == 4, "two that share a beginning, and one"
    gone += [weakref.ref(prefixes_of.slots(node())) for node in gone]
    del root, inner
    prefixes(scheduler)
    assert all(each() is None for each in gone), turn
    assert tree.root_node.children == {}
"""

STAYED = """
from types import SimpleNamespace
from gpu_scheduler.engines.sglang.engine import ModelHost
from protos import engine_pb2

sent = []
channel = SimpleNamespace(send=lambda **message: sent.append(message))
engine = ModelHost(channel, SimpleNamespace(size=1, rank=0, gather=lambda one: [one]), None, None)
engine._build = lambda lifecycle: None
engine._serve = lambda lifecycle: 7
for clean in (True, False):
    engine._open = lambda load: SimpleNamespace(model=None, close=lambda: (clean, 600))
    engine._load(engine_pb2.Load(command_id=1))
    assert engine._ended is not clean
kept, done, _, failed = sent
assert kept["kept"].bytes == 600
assert done["done"].command_id == 7
assert failed["failed"].command_id == 7 and "stayed" in failed["failed"].reason

sent.clear()  # another rank is not clean
engine._ranks.gather = lambda own: [own, (False, 700)]
engine._open = lambda load: SimpleNamespace(model=None, close=lambda: (True, 600))
engine._ended = False
engine._load(engine_pb2.Load(command_id=1))
assert engine._ended and sent[0]["kept"].bytes == 700 and sent[1]["failed"].command_id == 7
"""


def test_the_next_model_finds_no_slots_tables_graph_memory_or_kernels_of_the_last(imported: Imported) -> None:
    imported.run(SCRIPT)


def test_cached_prompts_are_gone_with_the_cache_although_nothing_is_collected(imported: Imported) -> None:
    imported.run(FLUSHED)


def test_unloaded_model_and_its_graphs_are_freed_although_their_runner_is_still_held(imported: Imported) -> None:
    imported.run(HELD)


def test_unloaded_model_is_freed_although_methods_of_its_classes_cache_their_results(imported: Imported) -> None:
    imported.run(CACHED)


def test_a_strict_engine_is_not_clean_while_something_refers_to_a_part_of_the_model(imported: Imported) -> None:
    imported.run(LEFT)


def test_a_model_that_leaves_keeps_nothing_that_was_made_with_the_scheduler(imported: Imported) -> None:
    imported.run(FORGOTTEN)


def test_engine_in_which_parts_of_an_unloaded_model_remain_on_any_rank_reports_it_and_ends(imported: Imported) -> None:
    imported.run(STAYED)
