"""The manifests of nodes, made of those that are shipped. Pure."""

from __future__ import annotations

import tomllib
from collections.abc import Iterator, Mapping
from pathlib import PurePosixPath
from typing import Any

import yaml

from deploy.node.description import NodeDescription
from deploy.node.targets import KEYS
from deploy.node.yaml_text import dumps, renamed

SHIPPED = tuple(
    f"k8s/{name}.yaml"
    for name in ("00-namespace", "10-models", "20-configuration", "30-node", "40-placement", "50-gateway", "60-network")
)
_FIRST_PORT = 7010
_GIB = 1 << 30
_SPARE_GIB = 2
"""GiB of the loader beside images."""


def files(node: NodeDescription, texts: Mapping[str, str], shipped: Mapping[str, str]) -> dict[str, str]:
    """The manifests under the names of those that are shipped. `texts`: configuration file -> text."""
    manifests = {PurePosixPath(path).name: list(yaml.safe_load_all(shipped[path])) for path in SHIPPED}
    for name, documents in manifests.items():
        manifests[name] = [each for document in documents for each in _changed(document, node, texts)]
    return {name: dumps(documents) for name, documents in manifests.items()}


def _changed(document: dict[str, Any], node: NodeDescription, texts: Mapping[str, str]) -> Iterator[dict[str, Any]]:
    """The manifest for this node; none if it needs none."""
    own, numbers = node.kubernetes, range(len(node.groups))
    match document["kind"], document["metadata"]["name"]:
        case "PersistentVolumeClaim", name if own.models_claim != name:
            return  # it is there
        case "ConfigMap", "prism-catalogue":
            document["data"] = {"catalogue.toml": texts["catalogue.toml"]}
        case "ConfigMap", _:
            document["data"] = {name: text for name, text in texts.items() if name != "catalogue.toml"}
        case "ResourceClaimTemplate", _:
            (request,) = document["spec"]["spec"]["devices"]["requests"]
            request["exactly"]["count"] = sum(map(len, node.groups))
        case "DaemonSet", _:
            pod = document["spec"]["template"]["spec"]
            (first,) = pod["containers"]
            pod["containers"] = [_of_group(first, number) for number in numbers]
            (loader,) = (each for each in pod["initContainers"] if each["name"] == "loader")
            images = tomllib.loads(texts["loader.toml"])["host_capacity_bytes"]
            loader["resources"]["requests"]["memory"] = f"{-(-images // _GIB) + _SPARE_GIB}Gi"
        case "Service", "prism-node":
            *ports, scheduler = document["spec"]["ports"]
            document["spec"]["ports"] = [*ports, *(_of_group(scheduler, number) for number in numbers)]
        case "NetworkPolicy", "prism-node":
            (rule,) = (each for each in document["spec"]["ingress"] if each.get("ports") == [{"port": _FIRST_PORT}])
            rule["ports"] = [{"port": _FIRST_PORT + number} for number in numbers]
        case "Deployment", "prism-gateway":
            document["spec"]["replicas"] = own.gateways
            if node.keys_file:
                pod = document["spec"]["template"]["spec"]
                pod["volumes"].append({"name": "keys", "secret": {"secretName": "prism-keys"}})
                pod["containers"][0]["volumeMounts"].append({"name": "keys", "mountPath": KEYS, "readOnly": True})
        case "PodDisruptionBudget", _ if own.gateways == 1:
            return  # nodes could not be drained
    if "template" in document.get("spec", ()):
        _change_pod(document["spec"]["template"]["spec"], node, texts)
    yield document


def _change_pod(pod: dict[str, Any], node: NodeDescription, texts: Mapping[str, str]) -> None:
    needed = 0.0
    for container in [*pod.get("initContainers", ()), *pod["containers"]]:
        container["image"] = node.kubernetes.image
        if "--config" in container["command"]:
            config = tomllib.loads(texts[PurePosixPath(container["command"][-1]).name])
            needed += 2 * config.get("drain_s", 10) + 5
    pod["terminationGracePeriodSeconds"] = max(pod["terminationGracePeriodSeconds"], int(needed))
    for volume in pod["volumes"]:
        if "persistentVolumeClaim" in volume:
            volume["persistentVolumeClaim"]["claimName"] = node.kubernetes.models_claim


def _of_group(first: Any, number: int) -> Any:
    """What the first group has, for another one."""
    return renamed(first, {"scheduler-0": f"scheduler-{number}", str(_FIRST_PORT): str(_FIRST_PORT + number)})
