"""The dashboard against Grafana's own types, which know every key and drop what they do not know."""

import copy
import json

from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.cog.plugins import register_default_plugins
from grafana_foundation_sdk.models.dashboard import Dashboard

from deploy import monitoring

register_default_plugins()


def unknown(dashboard):
    """Paths of what Grafana's types do not have, or have otherwise."""
    return list(differences(dashboard, json.loads(JSONEncoder().encode(Dashboard.from_json(dashboard)))))


def differences(ours, theirs, path=""):
    if isinstance(ours, dict) and isinstance(theirs, dict):
        for key, value in ours.items():
            yield from differences(value, theirs.get(key), f"{path}/{key}")
    elif isinstance(ours, list) and isinstance(theirs, list) and len(ours) == len(theirs):
        for number, pair in enumerate(zip(ours, theirs, strict=True)):
            yield from differences(*pair, f"{path}/{number}")
    elif ours != theirs:
        yield path


def test_dashboard_has_only_keys_that_grafana_knows():
    assert unknown(monitoring.dashboard()) == []


def test_misspelled_dashboard_key_is_found_at_any_depth():
    wrong = copy.deepcopy(monitoring.dashboard())
    wrong["templating"]["list"][1]["multy"] = True
    wrong["panels"][1]["targets"][0]["expression"] = "up"
    wrong["panels"][1]["fieldConfig"]["defaults"]["custom"]["fillOpacty"] = 40
    assert set(unknown(wrong)) == {
        "/templating/list/1/multy",
        "/panels/1/targets/0/expression",
        "/panels/1/fieldConfig/defaults/custom/fillOpacty",
    }


def test_dashboard_panels_do_not_overlap():
    squares = [
        (x, y)
        for panel in monitoring.dashboard()["panels"]
        for x in range(panel["gridPos"]["x"], panel["gridPos"]["x"] + panel["gridPos"]["w"])
        for y in range(panel["gridPos"]["y"], panel["gridPos"]["y"] + panel["gridPos"]["h"])
    ]
    assert len(squares) == len(set(squares))
