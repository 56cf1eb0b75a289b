"""Errors of fetching a model from the hub, each as one line for people."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import httpx
from huggingface_hub import get_token
from huggingface_hub.errors import (
    DisabledRepoError,
    GatedRepoError,
    HfHubHTTPError,
    IncompleteSnapshotError,
    LocalEntryNotFoundError,
    OfflineModeIsEnabled,
    RemoteEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from deploy.hub.names import HubModel

EXPECTED = (HfHubHTTPError, httpx.HTTPError, httpx.InvalidURL, OSError, ValueError, RuntimeError)
"""Errors of the library that have a line; RuntimeError is its Rust part's."""
_UNAUTHORISED, _FORBIDDEN = 401, 403


def is_unreachable(error: Exception) -> bool:
    """Whether the hub gave no answer, or none that says anything of the model."""
    if isinstance(error, HfHubHTTPError):
        return error.response.status_code >= 500
    return isinstance(error, (httpx.TransportError, OfflineModeIsEnabled)) and not isinstance(
        error, (httpx.ProxyError, httpx.UnsupportedProtocol)
    )


def unreachable(error: Exception, endpoint: str) -> str:
    """Why the hub gave no answer."""
    if isinstance(error, OfflineModeIsEnabled):
        return "HF_HUB_OFFLINE is set"
    if not is_unreachable(error):
        return f"the hub at {endpoint} answers otherwise than a hub: {_first_line(error)}"
    return f"the hub at {endpoint} cannot be reached ({_first_line(error)})"


def line(error: Exception, model: HubModel, endpoint: str, cache: Path) -> str:
    """Why the model cannot be fetched into the cache, by its name."""
    page = f"{endpoint}/{model.repository}"
    status = error.response.status_code if isinstance(error, HfHubHTTPError) else 0
    if isinstance(error, GatedRepoError):
        return f"{model} is gated: accept its licence at {page}, and set HF_TOKEN to a token of that account{_token()}"
    if isinstance(error, DisabledRepoError):
        return f"{model} was disabled by its publisher"
    if isinstance(error, RevisionNotFoundError):
        return f"{model.repository} has no revision {model.revision!r}; {page}/tree/main lists branches and tags"
    if isinstance(error, RepositoryNotFoundError):
        return (
            f"the hub at {endpoint} has no model {model.repository}, or it is private and HF_TOKEN does not "
            f"open it{_token()}; nor is there such a folder here"
        )
    if isinstance(error, RemoteEntryNotFoundError):
        return f"{model}: {_first_line(error)}"
    if status in (_UNAUTHORISED, _FORBIDDEN):
        why = getattr(error, "server_message", None)
        said = f", {why}" if why else ""
        return f"{model}: the hub refuses the token ({status}{said}){_token()}; tokens: {endpoint}/settings/tokens"
    if isinstance(error, IncompleteSnapshotError):
        return f"{model}: the cache at {cache} has only a part of it, and {_without_hub(error, endpoint)}"
    if isinstance(error, LocalEntryNotFoundError):
        return f"{model}: the cache at {cache} does not have it, and {_without_hub(error, endpoint)}"
    if isinstance(error, httpx.ProxyError):
        return f"{model}: the proxy does not let through to {endpoint}: {_first_line(error)}"
    if isinstance(error, (httpx.UnsupportedProtocol, httpx.InvalidURL)):
        return f"{model}: HF_ENDPOINT is {endpoint}, which is no address of a hub: {_first_line(error)}"
    if isinstance(error, httpx.TransportError):
        return f"{model}: the connection broke ({_first_line(error)}); files that are complete stay for the next try"
    if getattr(error, "errno", None) in (errno.ENOSPC, errno.EDQUOT) or os.strerror(errno.ENOSPC) in str(error):
        return (
            f"{model}: the disk of {cache} is full; files that are complete stay for the next try, the others were "
            "removed. HF_HOME names another place"
        )
    if isinstance(error, OSError) and error.errno is not None and not isinstance(error, HfHubHTTPError):
        return (
            f"{model}: {error.filename or cache}: {os.strerror(error.errno)}; HF_HOME names another place for the cache"
        )
    return f"{model}: {_first_line(error)}"


def _without_hub(error: Exception, endpoint: str) -> str:
    """Why the hub was not asked, or did not answer."""
    cause = error.__cause__
    return unreachable(cause, endpoint) if isinstance(cause, Exception) else "the hub was not asked"


def _token() -> str:
    return " (a token is set)" if get_token() else " (no token is set)"


def _first_line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__
