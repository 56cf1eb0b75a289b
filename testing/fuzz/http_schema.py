"""Requests that schemathesis makes of /openapi.json: ones that fit it, and ones that do not."""

from __future__ import annotations

import random
import warnings
from typing import Any

import requests
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import seed as seeded
from schemathesis import GenerationMode
from schemathesis.checks import CHECKS  # noqa: F401  (fills the table that responses are checked by)

from testing.fuzz.outcome import SurfaceOutcome

_NOT_OURS = (503, 504)
_TIME_OUT_S = 60


def fuzz(base: str, key: str, model: str, cases: int, seed: int, outcome: SurfaceOutcome) -> None:
    """`cases` requests, of each operation and kind as many. What fits may be refused all the same (a model that there
    is not, a context that is too short), so only the responses' own forms are checked, and that none is a fault."""
    headers = {"authorization": f"Bearer {key}"} if key else {}
    document = requests.get(f"{base}/openapi.json", headers=headers, timeout=_TIME_OUT_S).json()
    schema = schemathesis.openapi.from_dict(document)
    operations = [result.ok() for result in schema.get_all_operations()]
    # Not all of an operation's kinds have as many different cases.
    each = max(1, cases // (2 * len(operations)))
    draw = random.Random(seed)
    for operation in operations:
        for mode in (GenerationMode.POSITIVE, GenerationMode.NEGATIVE):
            _run(operation, mode, base, headers, model, each, draw.randrange(1 << 30), outcome)


def _run(
    operation: Any,
    mode: GenerationMode,
    base: str,
    headers: dict[str, str],
    model: str,
    each: int,
    seed: int,
    outcome: SurfaceOutcome,
) -> None:
    @seeded(seed)
    @settings(
        max_examples=each,
        database=None,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(case=operation.as_strategy(generation_mode=mode))
    def one(case: Any) -> None:
        outcome.cases += 1
        if isinstance(case.body, dict):
            if "model" in case.body and seed % 4:
                case.body["model"] = model
            for limit in ("max_tokens", "max_completion_tokens"):
                if isinstance(case.body.get(limit), int) and case.body[limit] > 0:
                    case.body[limit] = min(case.body[limit], 8)
        answer = case.call(base_url=base, headers=headers, timeout=_TIME_OUT_S)
        outcome.answers[f"{case.path} {mode.value} {answer.status_code}"] += 1
        if answer.status_code >= 500 and answer.status_code not in _NOT_OURS:
            outcome.fault(f"{answer.status_code} to {case.as_curl_command()}")
        try:
            operation.validate_response(answer)
        except AssertionError as error:
            outcome.fault(f"{operation.path}: {str(error)[:300]} to {case.as_curl_command()}")
        except schemathesis.errors.SchemathesisError as error:
            outcome.fault(f"{operation.path}: {str(error)[:300]} to {case.as_curl_command()}")

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            one()
        except requests.Timeout as error:
            outcome.hangs += 1
            outcome.fault(f"hangs: {operation.path}: {error}")
