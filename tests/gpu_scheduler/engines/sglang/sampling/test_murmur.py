"""The hash against the published values of MurmurHash3."""

from __future__ import annotations

import numpy as np
import pytest

from gpu_scheduler.engines.sglang.sampling.murmur import murmur3


@pytest.mark.parametrize(("message", "expected"), [(b"", 0), (b"test", 0xBA6BD213)])
def test_murmur3_of_a_known_message_is_the_published_value(message: bytes, expected: int) -> None:
    words = [np.array([word], dtype=np.uint32) for word in np.frombuffer(message, dtype="<u4")]
    assert murmur3(words).tolist() == [expected]
