"""What SGLang 0.5.16 has only as a Triton kernel and a CPU needs as well: the hash behind seeded sampling.

Imports SGLang: only the engine process may import this.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from gpu_scheduler.engines.sglang.environment import has_gpu
from gpu_scheduler.engines.sglang.plugin import Hook

if TYPE_CHECKING:
    import torch

Words = NDArray[np.uint32]


def murmur3(blocks: list[Words]) -> Words:
    """MurmurHash3 (x86, 32 bits, seed 0; A. Appleby, public domain) of messages of 4-byte words, by broadcasting."""
    hashed = np.zeros(1, dtype=np.uint32)
    for block in blocks:
        mixed = _rotate(block * np.uint32(0xCC9E2D51), 15) * np.uint32(0x1B873593)
        hashed = _rotate(hashed ^ mixed, 13) * np.uint32(5) + np.uint32(0xE6546B64)
    hashed = hashed ^ np.uint32(4 * len(blocks))
    hashed = (hashed ^ (hashed >> np.uint32(16))) * np.uint32(0x85EBCA6B)
    hashed = (hashed ^ (hashed >> np.uint32(13))) * np.uint32(0xC2B2AE35)
    return hashed ^ (hashed >> np.uint32(16))


def _rotate(words: Words, bits: int) -> Words:
    return (words << np.uint32(bits)) | (words >> np.uint32(32 - bits))


def hash_places(seed: torch.Tensor, positions: torch.Tensor, columns: torch.Tensor) -> Any:
    """For each row (seed, position in the text) and column (place in the vocabulary) a 32-bit hash; SGLang makes its
    random numbers of them."""
    import torch

    seeds = seed.numpy().astype(np.uint64)[:, None]
    row = [(seeds & np.uint64(0xFFFFFFFF)).astype(np.uint32), (seeds >> np.uint64(32)).astype(np.uint32)]
    at = positions.numpy().astype(np.uint32)[:, None]
    return torch.from_numpy(murmur3([*row, at, columns.numpy().astype(np.uint32)[None, :]]))


HOOKS = [] if has_gpu() else [Hook("sglang.kernels.ops.sampling.murmur_hash.murmur_hash32", hash_places, "REPLACE")]
