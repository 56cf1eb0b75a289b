"""Latent rows as SGLang stores and reads them, through the views of our pool; and which pool a model gets."""

from __future__ import annotations

import pytest

from tests.gpu_scheduler.engines.sglang.forks import Imported

pytestmark = pytest.mark.sglang

STORED = """
import torch
from sglang.kernels.ops.kvcache.mla_buffer import set_mla_kv_buffer_naive
from sglang.kernels.ops.kvcache.set_mla_kv_buffer import set_mla_kv_buffer
from sglang.srt.mem_cache.layout.paged_view import paged_view

from gpu_scheduler.engines.sglang.kv.pools.kv_views import KvShape, kv_views

LAYERS, RANK, ROTATED, PAGES, PAGE_SIZE = 3, 8, 4, 5, 16
shape = KvShape(LAYERS, 1, RANK + ROTATED, 0, PAGE_SIZE, PAGES, torch.bfloat16)
assert shape.page_bytes == PAGE_SIZE * LAYERS * (RANK + ROTATED) * 2
raw = torch.zeros(PAGES * shape.page_bytes, dtype=torch.uint8)
buffers, _ = kv_views(raw, shape)
slots = PAGE_SIZE + torch.randperm((PAGES - 1) * PAGE_SIZE)  # the first page is the dummy
said = [
    (torch.rand(len(slots), 1, RANK).bfloat16(), torch.rand(len(slots), 1, ROTATED).bfloat16()) for _ in buffers
]
for buffer, (latent, rotated) in zip(buffers, said):
    # The kernel of GPUs takes the same view of the pool, with the same strides.
    assert buffer.view(len(buffer), -1).stride() == (LAYERS * (RANK + ROTATED), 1)
    set_mla_kv_buffer_naive(
        buffer, slots, latent, rotated, reserved_skip_index=0, dcp_world_size=1, dcp_rank=0
    )
for buffer, (latent, rotated) in zip(buffers, said):  # as FlashAttention and FlashMLA are given them
    for part, rows in ((buffer[:, :, :RANK], latent), (buffer[:, :, RANK:], rotated), (buffer, None)):
        read = paged_view(part, PAGE_SIZE)
        assert read.shape == (PAGES, PAGE_SIZE, 1, part.shape[-1]) and read.stride(-1) == 1
        if rows is not None:
            assert torch.equal(read[slots // PAGE_SIZE, slots % PAGE_SIZE], rows)
assert not raw[: shape.page_bytes].any(), "the dummy page is nobody's"
"""

CHOSEN = """
from types import SimpleNamespace

from sglang.srt.configs.nemotron_h import NemotronHConfig

from gpu_scheduler.engines.sglang.base.errors import BrokenModel
from gpu_scheduler.engines.sglang.hooks.memory import pool_class
from gpu_scheduler.engines.sglang.kv.pools.latent_pool import ElasticLatentPool
from gpu_scheduler.engines.sglang.kv.pools.pool import ElasticPool


class Theirs:
    pass


def chosen(kind, architecture, states=None, **more):
    config = SimpleNamespace(architectures=[architecture], **more)
    configurator = SimpleNamespace(
        use_mla_backend=kind == "mla",
        is_hybrid_swa=False,
        mambaish_config=states,
        hybrid_gdn_config=None,
        model_config=SimpleNamespace(hf_config=config),
    )
    return pool_class(lambda *_, kind, default: default, configurator, kind=kind, default=Theirs)


assert chosen("mha", "LlamaForCausalLM") is ElasticPool
assert chosen("mla", "DeepseekV3ForCausalLM") is ElasticLatentPool
assert chosen("dsa", "DeepseekV3ForCausalLM") is Theirs
for kind in ("mha", "mla", "dsa"):
    try:
        chosen(kind, "DeepseekV32ForCausalLM", index_topk=2048)
    except BrokenModel as refused:
        assert "an index of sparse attention, which is not elastic" in str(refused)
    else:
        raise AssertionError(f"{kind}: not refused")
assert chosen("mha", "NemotronHForCausalLM", states=NemotronHConfig()) is ElasticPool
for kind, states, why in (
    ("mha", SimpleNamespace(), "states of another kind than those of gated delta nets and of Nemotron's Mamba layers"),
    ("mla", NemotronHConfig(), "states beside windows or latent rows"),
):
    try:
        chosen(kind, "X", states=states)
    except BrokenModel as refused:
        assert why in str(refused)
    else:
        raise AssertionError(f"{why}: not refused")
"""

SCALED = """
import math

import torch
from sglang.srt.configs.model_config import compute_mla_mscale_scaling
from sglang.srt.layers.rotary_embedding.rope_variant import DeepseekScalingRotaryEmbedding

from gpu_scheduler.engines.sglang.policy.rope import for_latent

DIM, THETA, ORIGINAL, FACTOR, FAST, SLOW = 64, 1e4, 4096, 40.0, 32, 1


def scale(mscale):  # of a context that is FACTOR times the original
    return 0.1 * mscale * math.log(FACTOR) + 1.0


def published(mscale, of_all):
    # Frequencies between those that turn FAST and SLOW times in the original context go over from one to the other.
    turns = [DIM * math.log(ORIGINAL / (number * 2 * math.pi)) / (2 * math.log(THETA)) for number in (FAST, SLOW)]
    low, high = max(math.floor(turns[0]), 0), min(math.ceil(turns[1]), DIM - 1)
    keep = 1 - ((torch.arange(DIM // 2) - low) / (high - low)).clamp(0, 1)
    plain = THETA ** -(torch.arange(0, DIM, 2) / DIM)
    angles = torch.outer(torch.arange(200.0), plain / FACTOR * (1 - keep) + plain * keep)
    table = torch.cat([angles.cos(), angles.sin()], dim=-1) * (scale(mscale) / scale(of_all))
    return table, 192**-0.5 * (scale(of_all) ** 2 if of_all else 1.0)


for mscale, of_all in ((0.707, 0.707), (1.0, 1.0), (1.0, 0.5), (0.9, 0.0)):
    told = {"rope_type": "yarn", "factor": FACTOR, "original_max_position_embeddings": ORIGINAL, "rope_theta": THETA}
    told |= {"beta_fast": FAST, "beta_slow": SLOW, "mscale": mscale, "mscale_all_dim": of_all}
    given = for_latent(told, int(ORIGINAL * FACTOR), on_cpu=True)
    names = ("beta_fast", "beta_slow", "mscale", "mscale_all_dim")
    made = DeepseekScalingRotaryEmbedding(
        DIM, DIM, given["original_max_position_embeddings"], given["rope_theta"], False, given["factor"], torch.float32,
        device="cpu", **{name: given[name] for name in names},
    )
    table, softmax = published(mscale, of_all)
    torch.testing.assert_close(made.cos_sin_cache[:200], table, rtol=1e-5, atol=1e-5)
    assert abs(compute_mla_mscale_scaling(given, 192**-0.5) - softmax) < 1e-9, (mscale, of_all)
"""


def test_latent_rows_that_sglang_stores_are_those_that_its_attention_reads(imported: Imported) -> None:
    imported.run(STORED)


def test_models_get_our_pool_of_their_kind_and_those_of_other_kinds_are_refused_by_name(imported: Imported) -> None:
    imported.run(CHOSEN)


def test_scales_of_sines_and_softmax_are_those_of_the_published_formula(imported: Imported) -> None:
    """Transformers takes another scale of the sines where one of the two is missing or 0; published models have both,
    and both alike."""
    imported.run(SCALED)
