"""The compose file of a node, made of the one that is shipped. Pure."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping
from pathlib import PurePosixPath
from typing import Any

import yaml

from deploy.node.description import NodeDescription
from deploy.node.services import stop_s
from deploy.node.targets import KEYS
from deploy.node.yaml_text import dumps, renamed

SHIPPED = ("compose/compose.yaml", "compose/compose.cuda.yaml")
_FIRST = "gpu-scheduler-0"
_ETC = PurePosixPath("/etc/prism")


def files(node: NodeDescription, texts: Mapping[str, str], shipped: Mapping[str, str]) -> dict[str, str]:
    """`compose.yaml` and the files below `config`, which lies beside it. `texts`: configuration file -> text."""
    device = "cuda" if node.on_gpus else "cpu"
    plain, for_gpus = (yaml.safe_load(_filled(shipped[name], {"PRISM_DEVICE": device})) for name in SHIPPED)
    # Monitoring and traces are profiles of the shipped file.
    services = {name: service for name, service in plain["services"].items() if "profiles" not in service}
    for name, more in for_gpus["services"].items() if node.on_gpus else ():
        services[name] |= more
    first = services.pop(_FIRST)
    schedulers = {
        name: renamed(first, {_FIRST: name}) for name in (f"gpu-scheduler-{i}" for i in range(len(node.groups)))
    }
    ordered: dict[str, Any] = {}
    for name, service in services.items():
        if name == "placement":
            ordered |= schedulers
            service["depends_on"] = dict.fromkeys(schedulers, service["depends_on"][_FIRST])
        ordered[name] = service
    made = {}
    for service in ordered.values():
        del service["build"]
        service["image"] = node.compose.image or f"prism:{device}"
        if "--config" in service["command"]:
            path = PurePosixPath(service["command"][-1])
            made[f"config/{path.relative_to(_ETC)}"] = text = texts[path.name]
            leaves = int(service["stop_grace_period"].removesuffix("s"))
            service["stop_grace_period"] = f"{max(leaves, stop_s(tomllib.loads(text)))}s"
        for volume in service.get("volumes", ()):
            if volume["target"] == "/models":
                volume["source"] = node.models_folder
    gateway = ordered["gateway"]
    gateway["ports"] = [f"{node.http}:8000"]
    if node.grpc and not node.grpc.startswith("unix:"):
        gateway["ports"].append(f"{node.grpc}:8001")
    if node.keys_file:
        keys = str(PurePosixPath(node.keys_file).parent)
        gateway["volumes"].append(
            {"type": "bind", "source": keys, "target": KEYS, "read_only": True, "bind": {"create_host_path": False}}
        )
    used = {volume["source"] for service in ordered.values() for volume in service.get("volumes", ())}
    volumes = {name: how for name, how in plain["volumes"].items() if name in used}
    whole = {"name": plain["name"], "services": ordered, "networks": plain["networks"], "volumes": volumes}
    return {"compose.yaml": dumps([whole]), **made, "config/catalogue.toml": texts["catalogue.toml"]}


def _filled(text: str, variables: Mapping[str, str]) -> str:
    """The text with these variables filled in; others stay."""
    return re.sub(r"\$\{(\w+):-[^}]*\}", lambda found: variables.get(found[1], found[0]), text)
