"""Questions for models, to see them answer."""

from __future__ import annotations

_SUBJECTS = {"llama-debian": "What is Debian?", "qwen2-python": "What is a list?", "qwen3-perl": "What is Perl?"}
"""Model -> question; each demonstration model knows one subject."""


def question(model: str) -> str:
    """A question that a model of this name can answer."""
    return _SUBJECTS.get(model, "What is the capital of France?")
