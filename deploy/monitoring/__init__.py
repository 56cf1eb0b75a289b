"""What Prometheus and Grafana need of Prism: alert rules, and a dashboard that is made here.

    python -m deploy.monitoring            # writes deploy/monitoring/dashboards/prism.json anew

PANELS says what is on the dashboard; the rest is Grafana's form. Every metric and label that is named here or in
alerts.yaml exists: a test scrapes a running system.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent
DASHBOARD = FOLDER / "dashboards" / "prism.json"
ALERTS = FOLDER / "alerts.yaml"
_WIDE, _HIGH, _ACROSS = 8, 8, 24
"""Size of a panel in Grafana's columns and rows, and columns of the dashboard."""
_SOURCE = {"type": "prometheus", "uid": "${source}"}
_OF_MODEL = 'model=~"$model"'
_OF_CLIENTS = 'path!~"/health|/metrics|/ui"'
"""Selector without the paths on which tools look at the gateway itself every few seconds."""
_OF_DEVICE = 'device=~"$device"'


Queries = tuple[tuple[str, str], ...]
"""(PromQL, its legend) of each series."""


@dataclass(frozen=True)
class Panel:
    """A panel. `stacked`: areas on each other; `states`: one row for each series, over time."""

    title: str
    queries: Queries
    unit: str = "short"
    stacked: bool = False
    states: bool = False
    most: float | None = None


def _quantiles(metric: str, labels: str, by: str) -> Queries:
    """The median and 99th percentile of a histogram, over the dashboard's interval."""
    rate = f"sum by (le, {by}) (rate({metric}_bucket{{{labels}}}[$__rate_interval]))"
    return tuple((f"histogram_quantile({q}, {rate})", f"{{{{{by}}}}} p{100 * q:g}") for q in (0.5, 0.99))


def _rate(metric: str, labels: str, by: str) -> Queries:
    return ((f"sum by ({by}) (rate({metric}{{{labels}}}[$__rate_interval]))", f"{{{{{by}}}}}"),)


PANELS: dict[str, tuple[Panel, ...]] = {
    "What clients see": (
        Panel(
            "Requests by status",
            _rate("prism_gateway_requests_total", f"{_OF_MODEL}, {_OF_CLIENTS}", "status"),
            "reqps",
            stacked=True,
        ),
        Panel(
            "Requests that were refused or failed",
            (
                (
                    f"sum by (status, code) (rate(prism_gateway_requests_total{{{_OF_MODEL}, {_OF_CLIENTS}, "
                    'code!=""}[$__rate_interval]))',
                    "{{status}} {{code}}",
                ),
            ),
            "reqps",
            stacked=True,
        ),
        Panel("Answers by outcome", _rate("prism_gateway_answers_total", _OF_MODEL, "outcome"), "reqps", stacked=True),
        Panel(
            "Targets met",
            (
                (
                    f'sum by (model, target) (rate(prism_gateway_slo_requests_total{{{_OF_MODEL}, met="true"}}[5m])) / '
                    f"sum by (model, target) (rate(prism_gateway_slo_requests_total{{{_OF_MODEL}}}[5m]))",
                    "{{model}} {{target}}",
                ),
            ),
            "percentunit",
            most=1.0,
        ),
        Panel("Time to first token", _quantiles("prism_gateway_ttft_seconds", _OF_MODEL, "model"), "s"),
        Panel("Time between tokens", _quantiles("prism_gateway_token_gap_seconds", _OF_MODEL, "model"), "s"),
        Panel(
            "Tokens",
            (
                (f"sum(rate(prism_gateway_prompt_tokens_total{{{_OF_MODEL}}}[$__rate_interval]))", "prompts"),
                (f"sum(rate(prism_gateway_output_tokens_total{{{_OF_MODEL}}}[$__rate_interval]))", "answers"),
            ),
            "short",
        ),
        Panel(
            "In flight, and sent again after a failure",
            (
                ("sum(prism_gateway_in_flight_requests)", "in flight"),
                (f"sum(rate(prism_gateway_replays_total{{{_OF_MODEL}}}[$__rate_interval]))", "sent again a second"),
            ),
        ),
    ),
    "Memory of the devices": (
        Panel(
            "By owner",
            (
                (f"sum by (model, kind) (prism_model_memory_bytes{{{_OF_DEVICE}}})", "{{model}} {{kind}}"),
                (f'sum(prism_device_memory_bytes{{{_OF_DEVICE}, state="free"}})', "free"),
                (f'sum(prism_device_memory_bytes{{{_OF_DEVICE}, state="stranded"}})', "stranded"),
            ),
            "bytes",
            stacked=True,
        ),
        Panel(
            "KV: used, cached, limit",
            (
                (f"sum by (model) (prism_kv_used_bytes{{{_OF_MODEL}}})", "{{model}} used"),
                (f"sum by (model) (prism_kv_cached_bytes{{{_OF_MODEL}}})", "{{model}} cached"),
                (f"sum by (model) (prism_model_kv_limit_bytes{{{_OF_MODEL}}})", "{{model}} limit"),
            ),
            "bytes",
        ),
        Panel(
            "KV in use, of the limit", ((f"prism_kv_use_ratio{{{_OF_MODEL}}}", "{{model}}"),), "percentunit", most=1.0
        ),
        Panel("Pressure (KVPR)", (("prism_pressure", "{{group}}"),)),
        Panel("KV that is lacking", ((f"prism_kv_lacking_bytes{{{_OF_MODEL}}}", "{{model}}"),), "bytes", stacked=True),
        Panel("Growth, from request to grant", _quantiles("prism_growth_seconds", 'outcome="granted"', "kind"), "s"),
        Panel("Cached tokens dropped", _rate("prism_evicted_tokens_total", _OF_MODEL, "model")),
        Panel("Requests put back", _rate("prism_retractions_total", _OF_MODEL, "model"), "reqps"),
        Panel("Growth refused", _rate("prism_growth_seconds_count", 'outcome="refused"', "kind"), "ops"),
    ),
    "Models": (
        Panel("Residency", ((f"prism_residency{{{_OF_MODEL}}} == 1", "{{model}} {{device}} {{state}}"),), states=True),
        Panel(
            "Queue",
            (
                (f"sum by (model) (prism_requests_waiting{{{_OF_MODEL}}})", "{{model}} waiting"),
                (f"sum by (model) (prism_requests_late{{{_OF_MODEL}}})", "{{model}} late"),
                (f"sum by (model) (prism_requests_running{{{_OF_MODEL}}})", "{{model}} running"),
            ),
        ),
        Panel(
            "Decodes that stand still for other models, of the time",
            _rate("prism_decode_stood_still_seconds_total", _OF_MODEL, "model"),
            "percentunit",
        ),
        Panel("Coming up", _quantiles("prism_activation_seconds", _OF_MODEL, "source"), "s"),
        Panel("Times that models came up", _rate("prism_activation_seconds_count", _OF_MODEL, "source"), "ops"),
        Panel("Times that models fell asleep", _rate("prism_hibernations_total", _OF_MODEL, "model"), "ops"),
        Panel("Since the last request", ((f"prism_idle_seconds{{{_OF_MODEL}}}", "{{model}}"),), "s"),
    ),
    "Weights": (
        Panel(
            "Images in host memory",
            (("prism_image_held_bytes", "held"), ("prism_image_capacity_bytes", "capacity")),
            "bytes",
        ),
        Panel("Copied", _rate("prism_image_copied_bytes_total", "", "direction"), "Bps"),
        Panel("What a copy takes", _quantiles("prism_copy_seconds", "", "direction"), "s"),
        Panel("Disk", _rate("prism_image_disk_moved_bytes_total", "", "direction"), "Bps"),
        Panel("Catalogue", (("prism_catalogue_models", "{{state}}"),)),
    ),
    "Health": (
        Panel("Scraped", (('up{job="prism"}', "{{instance}}"),), states=True),
        Panel("Routes are fresh", (("prism_gateway_routes_fresh", "{{instance}}"),), states=True),
        Panel(
            "Reachable",
            (("prism_group_reachable", "group {{group}}"), ("prism_balloond_reachable", "balloond of {{device}}")),
            states=True,
        ),
        Panel("Warm engines", (("prism_warm_engines", "{{device}}"),)),
    ),
}
"""Title of a row -> its panels."""


def dashboard() -> dict[str, Any]:
    """The dashboard in Grafana's form."""
    panels: list[dict[str, Any]] = []
    y = 0
    for row, of_row in PANELS.items():
        panels.append(_panel(len(panels), {"type": "row", "title": row}, 0, y, _ACROSS, 1))
        y += 1
        for number, each in enumerate(of_row):
            x = number * _WIDE % _ACROSS
            panels.append(_panel(len(panels), _of(each), x, y + number * _WIDE // _ACROSS * _HIGH, _WIDE, _HIGH))
        y += -(-len(of_row) * _WIDE // _ACROSS) * _HIGH
    return {
        "uid": "prism",
        "title": "Prism",
        "tags": ["prism"],
        "schemaVersion": 41,
        "editable": True,
        "refresh": "5s",
        "time": {"from": "now-30m", "to": "now"},
        "templating": {
            "list": [
                {"name": "source", "type": "datasource", "query": "prometheus", "label": "Source"},
                _variable("model", "label_values(prism_residency, model)"),
                _variable("device", "label_values(prism_device_memory_bytes, device)"),
            ]
        },
        "panels": panels,
    }


def _panel(number: int, body: dict[str, Any], x: int, y: int, wide: int, high: int) -> dict[str, Any]:
    return {"id": number + 1, "gridPos": {"x": x, "y": y, "w": wide, "h": high}, **body}


def _of(panel: Panel) -> dict[str, Any]:
    custom: dict[str, Any] = {"fillOpacity": 40 if panel.stacked else 0, "showPoints": "never"}
    if panel.stacked:
        custom["stacking"] = {"mode": "normal"}
    defaults: dict[str, Any] = {"unit": panel.unit, "min": 0, "custom": {} if panel.states else custom}
    if panel.most is not None:
        defaults["max"] = panel.most
    return {
        "type": "state-timeline" if panel.states else "timeseries",
        "title": panel.title,
        "datasource": _SOURCE,
        "fieldConfig": {"defaults": defaults, "overrides": []},
        "options": {
            "legend": {"displayMode": "list", "placement": "bottom"},
            "tooltip": {"mode": "multi", "sort": "desc"},
        },
        "targets": [
            {"refId": chr(ord("A") + number), "expr": expression, "legendFormat": legend, "datasource": _SOURCE}
            for number, (expression, legend) in enumerate(panel.queries)
        ],
    }


def _variable(name: str, query: str) -> dict[str, Any]:
    return {
        "name": name,
        "type": "query",
        "datasource": _SOURCE,
        "query": {"query": query, "refId": name},
        "refresh": 2,
        "multi": True,
        "includeAll": True,
        "allValue": ".*",
        "current": {"text": "All", "value": "$__all"},
    }
