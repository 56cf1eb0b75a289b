"""The hash that random numbers are made of: MurmurHash3 (x86, 32 bits, seed 0; A. Appleby, public domain)."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Words = NDArray[np.uint32]


def murmur3(blocks: list[Words]) -> Words:
    """Hashes of messages of 4-byte words, one array (uint32) per word position; arrays broadcast against each other."""
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
