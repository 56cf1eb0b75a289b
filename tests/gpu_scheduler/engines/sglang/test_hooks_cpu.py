"""The hash against the published values of MurmurHash3."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from gpu_scheduler.engines.sglang.hooks_cpu import hash_places, murmur3


@pytest.mark.parametrize(("message", "expected"), [(b"", 0), (b"test", 0xBA6BD213)])
def test_known_values(message: bytes, expected: int) -> None:
    words = [np.array([word], dtype=np.uint32) for word in np.frombuffer(message, dtype="<u4")]
    assert murmur3(words).tolist() == [expected]


def test_every_row_and_column_has_its_own_hash() -> None:
    seed = torch.tensor([7, 7, 8, 7 << 40], dtype=torch.uint64)
    positions = torch.tensor([1, 2, 1, 1])
    hashed = hash_places(seed, positions, torch.arange(500))
    assert hashed.shape == (4, 500) and hashed.dtype == torch.uint32
    assert len(set(hashed.numpy().ravel().tolist())) > 1990
    assert torch.equal(hash_places(seed[:1], positions[:1], torch.arange(500))[0], hashed[0])
