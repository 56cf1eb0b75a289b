"""Paths of requests: one way to write each, and their names in metrics."""

from __future__ import annotations

_DIRECTORY = "/ui/"
"""Path of the page itself: its files are named relative to it, and the path without the slash leads here."""
_KNOWN = frozenset(
    (
        "/v1/chat/completions",
        "/v1/completions",
        "/v1/responses",
        "/v1/embeddings",
        "/v1/score",
        "/v1/rerank",
        "/rerank",
        "/v2/rerank",
        "/v1/messages",
        "/v1/messages/count_tokens",
        "/v1/models",
        "/tokenize",
        "/detokenize",
        "/openapi.json",
        "/health",
        "/metrics",
    )
)
_OF_A_MODEL = "/v1/models/"
_PAGE = "/ui"
OTHER = "other"


def plain(path: str) -> str:
    """The path with one slash where it has several, and none at its end. Access is decided by this path, and the router
    looks it up, so that no path can mean one thing to access and another to the router."""
    if not path.startswith("/") or ("//" not in path and not path.endswith("/")):
        return path
    parts = "/".join(part for part in path.split("/") if part)
    return _DIRECTORY if f"/{parts}/" == _DIRECTORY and path.endswith("/") else f"/{parts}"


def label(path: str) -> str:
    """The path's label in metrics, one of a few: names that clients make up must not become series."""
    if path in _KNOWN:
        return path
    if path.startswith(_OF_A_MODEL):
        return f"{_OF_A_MODEL}{{model}}"
    return _PAGE if path == _PAGE or path.startswith(_DIRECTORY) else OTHER
