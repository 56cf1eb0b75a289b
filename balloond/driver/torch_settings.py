"""Settings of torch's own allocator that do not go together with ranges."""

from __future__ import annotations

from collections.abc import Mapping

_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")


def conflict(environ: Mapping[str, str]) -> str:
    """Why torch may not start in this environment, in one line; empty if it may. To be called before torch is imported:
    it reads the variables then."""
    for name in _VARIABLES:
        settings = dict(part.strip().partition(":")[::2] for part in environ.get(name, "").split(","))
        if settings.get("expandable_segments", "").strip().lower() == "true":
            return (
                f"{name} sets expandable_segments: torch would map and unmap device memory in its own way beside "
                "balloond's, which is not supported; unset it"
            )
    return ""
