"""The gateway's metrics. "Time to first token" is from the arrival of the request to that of its first token from the
group, before it becomes text, also for answers that are not streamed."""

from __future__ import annotations

from collections.abc import Mapping

from prometheus_client import Counter, Gauge, Histogram

from gateway import errors
from services.errors import PrismError

_TTFT_BUCKETS_S = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30, 60)
_GAP_BUCKETS_S = (0.002, 0.005, 0.01, 0.015, 0.02, 0.03, 0.04, 0.05, 0.06, 0.08, 0.1, 0.15, 0.2, 0.5, 1, 5)

_GONE = 499
"""nginx's status of a request whose client went away before there was an answer."""
GONE = "client_gone"
FAULT = "fault"
"""Codes that no client gets: for a client that went away, and for a fault of the gateway, which has no code."""

REQUESTS = Counter(
    "prism_gateway_requests", "Requests that were answered or given up", ["model", "path", "status", "code"]
)
ANSWERS = Counter("prism_gateway_answers", "Answers of models that ended, by how", ["model", "outcome"])
IN_FLIGHT = Gauge("prism_gateway_in_flight_requests", "Answers being made or waited for")
TTFT = Histogram("prism_gateway_ttft_seconds", "Time to first token", ["model"], buckets=_TTFT_BUCKETS_S)
GAP = Histogram("prism_gateway_token_gap_seconds", "Time between chunks of tokens", ["model"], buckets=_GAP_BUCKETS_S)
SLO = Counter(
    "prism_gateway_slo_requests",
    "Answers with a target (ttft or tpot), by whether it was met",
    ["model", "target", "met"],
)
REPLAYS = Counter("prism_gateway_replays", "Requests sent again after a group failed or gave them back", ["model"])
PROMPT_TOKENS = Counter("prism_gateway_prompt_tokens", "Tokens of prompts", ["model"])
OUTPUT_TOKENS = Counter("prism_gateway_output_tokens", "Tokens of answers", ["model"])
KEY_TOKENS = Counter(
    "prism_gateway_key_tokens",
    "Tokens by key, and by kind: prompt, cached (part of those), output",
    ["key", "model", "kind"],
)
USAGE_LOST = Counter("prism_gateway_usage_lost", "Requests whose line could not be written to usage_file")
UNUSABLE = Gauge(
    "prism_gateway_model_unusable", "1 for a model that this gateway refuses every request for, else 0", ["model"]
)
_OF_MODELS = (UNUSABLE, REQUESTS, ANSWERS, TTFT, GAP, SLO, REPLAYS, PROMPT_TOKENS, OUTPUT_TOKENS, KEY_TOKENS)
QUOTA_STORAGE_AWAY = Gauge(
    "prism_gateway_quota_storage_away", "1 while quota_storage does not answer and this gateway counts for itself"
)
ROUTES_FRESH = Gauge("prism_gateway_routes_fresh", "1 while placement's route stream is open")


class Count:
    """The counts of one request, which are added once, when it ends."""

    def __init__(self, path: str) -> None:
        """`path`: one of a few labels (`gateway/http/paths.py`), or a method of gRPC."""
        self._path = path
        self._status = 0
        self._code = ""
        self.model = ""
        """Name of an existing model that the caller may use; empty: the request named none. Other names, which clients
        can make up, must not become series."""

    def answered(self, status: int, code: str = "") -> None:
        """Sets the answer's HTTP status (for a gRPC call the corresponding one), and the code of its error. The first
        of several statuses holds, as it was sent: a stream that fails is a 200 with a code."""
        self._status = self._status or status
        self._code = self._code or code

    def failed(self, error: PrismError) -> None:
        self.answered(errors.shape(error).status, errors.code(error) or FAULT)

    def fault(self) -> None:
        """Counts a fault of the gateway."""
        self.answered(500, FAULT)

    def gone(self) -> None:
        """Counts a client that went away."""
        self.answered(_GONE, GONE)

    def end(self) -> None:
        if not self._status:
            self.gone()
        REQUESTS.labels(self.model, self._path, str(self._status), self._code).inc()


class Series:
    """Removes the series of models that are gone: names may come and go for ever. A listener of the route table."""

    def __init__(self) -> None:
        self._known: set[str] = set()
        self._gone: set[str] = set()

    def __call__(self, routes: Mapping[str, object]) -> None:
        gone = self._known - routes.keys()
        self._known = set(routes)
        if gone:
            # Models that went at the last change are removed again: a request that has ended since has made their
            # series anew.
            for model in gone | (self._gone - routes.keys()):
                for metric in _OF_MODELS:
                    metric.remove_by_labels({"model": model})
            self._gone = gone
