"""Dashboard and alerts ask for what a running system tells."""

import contextlib
import json
import re
import tomllib
from pathlib import Path

import promql_parser
import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from deploy import monitoring
from protos import common_pb2
from testing.ports import free_ports
from testing.systems.local import world

NAME = re.compile(r"\b(prism_[a-z_]+|vllm:[a-z_]+)(\{[^}]*\})?")
LABEL = re.compile(r"(\w+)\s*(?:=~|!~|!=|=)")
NEVER_HERE = {"prism_image_disk_moved_bytes", "prism_gateway_replays"}
"""Series that a system without a disk for images and without faults does not have; the families are there."""


def expressions():
    of_panels = [query for row in monitoring.PANELS.values() for panel in row for query, _ in panel.queries]
    rules = yaml.safe_load(monitoring.ALERTS.read_text())["groups"]
    return [*of_panels, *(rule["expr"] for group in rules for rule in group["rules"])]


def plain(expression):
    """Without what Grafana fills in."""
    return expression.replace("$__rate_interval", "5m").replace("$model", ".*").replace("$device", ".*")


def family(name, known):
    """Of a series: histograms and counters have several."""
    bases = (name.removesuffix(suffix) for suffix in ("", "_bucket", "_count", "_sum", "_total"))
    return next((base for base in bases if base in known), None)


def test_dashboard_in_the_tree_is_what_the_panels_generate():
    assert json.loads(monitoring.DASHBOARD.read_text()) == monitoring.dashboard()


@pytest.mark.parametrize("expression", expressions())
def test_monitoring_expressions_are_valid_promql(expression):
    promql_parser.parse(plain(expression))


def missing(told):
    """What expressions ask for and no process tells."""
    for expression in expressions():
        for name, labels in NAME.findall(plain(expression)):
            base = family(name, told)
            if not base:
                yield f"{name} of {expression!r}"
            elif (without := set(LABEL.findall(labels)) - told[base]) and base not in NEVER_HERE:
                yield f"{name} has no {without}"


WELL = ("prism_gateway_routes_fresh", "prism_group_reachable", "prism_balloond_reachable")
"""1 in a system that is well."""


def documented():
    """Families of the table of metrics."""
    text = (Path(monitoring.__file__).parents[2] / "docs" / "operate" / "monitoring.md").read_text()
    table = text.partition("\n## ")[0]
    return {name.removesuffix("_total") for name in re.findall(r"`((?:prism|vllm:)_?[a-z_]+)`", table)}


async def test_metrics_and_labels_of_all_expressions_are_exported_by_a_running_system(executed):
    async with world("echo", metrics_port=free_ports(8)) as at:
        model = "llama-debian"
        headers = {"x-slo-ttft-ms": "60000", "x-slo-tpot-ms": "60000"}
        body = {"model": model, "prompt": "a b c", "max_tokens": 4, "temperature": 0}
        assert (await at.post("/v1/completions", body, headers=headers))[0] == 200
        await at.wait_residency(model, common_pb2.ACTIVE)
        told, values = {}, {}

        async def scrape():
            told.clear()
            values.clear()
            configured = [tomllib.loads(path.read_text()) for path in at.local.state.glob("*.toml")]
            for address in [at.local.http, *(config["metrics"] for config in configured if "metrics" in config)]:
                async with at.http.get(f"http://{address}/metrics") as answer:
                    for one in text_string_to_metric_families(await answer.text()):
                        told.setdefault(one.name, set()).update(label for s in one.samples for label in s.labels)
                        values.setdefault(one.name, []).extend(sample.value for sample in one.samples)
            # Gauges are told once a second: the first ones may be older than the system is well.
            lacking.clear()
            lacking.extend(name for name in WELL if set(values.get(name, ())) != {1.0})
            labels = (("prism_residency", "state"), ("prism_pressure", "group"))
            lacking.extend(name for name, label in labels if label not in told.get(name, ()))
            lacking.extend(missing(told))
            return not lacking

        lacking = []
        with contextlib.suppress(TimeoutError):
            await at.until(scrape, "gauges do not come")
        assert not lacking
    ours = {name for name in told if name.startswith(("prism_", "vllm:")) and not name.endswith("_created")}
    assert ours == documented(), "docs/operate/monitoring.md"


def test_alerts_all_have_a_unit_test_that_fires_and_one_that_does_not():
    rules = yaml.safe_load(monitoring.ALERTS.read_text())["groups"]
    tried = yaml.safe_load(Path(__file__).with_name("alerts_test.yaml").read_text())["tests"]
    cases = [case for test in tried for case in test["alert_rule_test"]]
    every = {rule["alert"] for group in rules for rule in group["rules"]}
    assert {case["alertname"] for case in cases if case["exp_alerts"]} == every
    assert {case["alertname"] for case in cases if not case["exp_alerts"]} == every
