"""The wording of a model's error, wherever it is shown. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def fault(model: Mapping[str, Any]) -> str:
    """For a model of `views.models`: its error, the time within which it is tried again if the error may pass, and its
    folder, which the error does not name; empty if it has no error."""
    if not model["error"]:
        return ""
    again = f"; it is tried again within {model['retry_s']:.0f} s" if model["retry_s"] else ""
    folder = f" ({model['path']})" if model["path"] else ""
    return f"{model['error']}{again}{folder}"
