"""What torch's allocator calls, called as it does: through C. The rest needs a GPU (`tests/gpu`)."""

import ctypes
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from balloond.backends.cpu import CpuMapper
from gpu_scheduler.engines.sglang.memory.graph_memory import GraphMemory, GraphMemorySource, live

MIB = 1 << 20


class Pieces:
    """A range of two MiB."""

    def __init__(self):
        self.address = CpuMapper().reserve(2 * MIB)
        self.out = {}

    def take(self, nbytes):
        if sum(self.out.values()) + nbytes > 2 * MIB:
            raise MemoryError("no more")
        address = self.address + sum(self.out.values())
        self.out[address] = nbytes
        return address

    def give(self, address):
        del self.out[address]


@pytest.fixture
def source():
    source = GraphMemorySource()
    source.pieces = Pieces()
    return source


def called(source):
    """The two as C functions."""
    malloc = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int, ctypes.c_void_p)
    free = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int, ctypes.c_void_p)
    at = source.addresses
    return malloc(at[0]), free(at[1])


def test_graph_memory_comes_from_the_range_and_goes_back(source):
    malloc, free = called(source)
    first, second = malloc(MIB, 0, None), malloc(MIB, 0, None)
    assert (first, second) == (source.pieces.address, source.pieces.address + MIB)
    free(first, MIB, 0, None)
    assert source.pieces.out == {second: MIB}


def test_graph_memory_that_is_refused_is_null(source):
    malloc, _ = called(source)
    assert malloc(3 * MIB, 0, None) is None
    assert malloc(MIB, 0, None) is not None


def test_graph_memory_without_a_model_is_refused_and_late_frees_are_ignored(source):
    malloc, free = called(source)
    address = malloc(MIB, 0, None)
    pieces, source.pieces = source.pieces, None
    assert malloc(MIB, 0, None) is None
    free(address, MIB, 0, None)
    source.pieces = pieces
    free(address + 1, MIB, 0, None)
    assert pieces.out == {address: MIB}


def test_blocks_in_use_keep_their_values_unless_they_are_scratch_or_free():
    def segment(pool, address, *states):
        blocks = [{"size": 512, "state": state} for state in states]
        return {"address": address, "total_size": 512 * len(blocks), "blocks": blocks, **pool}

    graphs, scratch = (0, 4), (0, 5)
    segments = [
        segment({"segment_pool_id": graphs}, 4096, "inactive", "active_allocated", "active_pending_free", "inactive"),
        segment({"segment_pool_id": scratch}, 8192, "active_allocated", "inactive"),
        segment({"segment_pool_id": (0, 0)}, 12288, "active_allocated"),
        segment({}, 16384, "active_allocated", "inactive"),
    ]
    assert live(segments, 4096, scratch) == [(512, 1024), (8192, 512), (12288, 512)]


class Products(TorchDispatchMode):
    """Names of the operations that run, with whether memory comes from the scratch pool meanwhile."""

    def __init__(self):
        super().__init__()
        self.in_scratch = False
        self.ran = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.ran.append((func.overloadpacket._qualified_op_name, self.in_scratch))
        return func(*args, **(kwargs or {}))


def test_stream_is_prepared_for_products_with_and_without_a_bias(monkeypatch):
    memory = GraphMemory.__new__(GraphMemory)
    memory._device = torch.device("cpu")
    products = Products()

    @contextmanager
    def scratch():
        products.in_scratch = True
        yield
        products.in_scratch = False

    monkeypatch.setattr(memory, "scratch", scratch)
    monkeypatch.setattr(torch.cuda, "stream", lambda _: nullcontext())
    monkeypatch.setattr(torch._C, "_cuda_clearCublasWorkspaces", lambda: None, raising=False)
    with products:
        memory.prepare_streams([SimpleNamespace(synchronize=lambda: None)])
    assert {("aten::mm", True), ("aten::addmm", True)} <= set(products.ran)
