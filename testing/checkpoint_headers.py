"""Files of weights without the weights: for whoever reads only what is in a file, or draws values of its own."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def write(path: Path, shapes: Mapping[str, tuple[int, ...]]) -> None:
    """A safetensors file of bf16 tensors with these shapes, by their names. The values are a hole on the disk, which
    reads as zeros."""
    header: dict[str, Any] = {}
    at = 0
    for name, shape in shapes.items():
        end = at + 2 * math.prod(shape)
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [at, end]}
        at = end
    encoded = json.dumps(header).encode()
    encoded += b" " * (-len(encoded) % 8)
    with open(path, "wb") as file:
        file.write(len(encoded).to_bytes(8, "little") + encoded)
        file.truncate(8 + len(encoded) + at)
