"""The files of a node under systemd: units, made of those that are shipped, and what lies in /etc/prism. Pure."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping
from pathlib import PurePosixPath

from deploy.node.description import NodeDescription
from deploy.node.services import stop_s

SHIPPED = (
    *(f"systemd/prism-{name}.service" for name in ("keeper", "balloond", "loader", "gpu-scheduler@")),
    *(f"systemd/prism-{name}.service" for name in ("placement", "gateway")),
    *(f"systemd/prism.{name}" for name in ("target", "sysusers.conf", "tmpfiles.conf")),
)
UNITS = "units"
"""Folder of the units, beside the configuration files."""
_TREE = "/opt/prism"
_PYTHON = f"{_TREE}/.venv/bin/python"
_GROUP = "prism-gpu-scheduler@0.service"
_STOP = re.compile(r"^TimeoutStopSec=(\d+)s$", re.MULTILINE)


def files(node: NodeDescription, texts: Mapping[str, str], shipped: Mapping[str, str]) -> dict[str, str]:
    """The configuration files, and the units below `UNITS`. `texts`: configuration file -> text."""
    groups = " ".join(_GROUP.replace("0", str(number)) for number in range(len(node.groups)))
    needed = {name.removesuffix(".toml"): stop_s(tomllib.loads(text)) for name, text in texts.items()}
    made = {}
    for path in SHIPPED:
        text = shipped[path].replace(f"Wants={_GROUP}", f"Wants={groups}").replace(_PYTHON, node.systemd.python)
        if node.systemd.python != _PYTHON:
            # Where Prism is installed as a package, there is no tree to run in.
            text = text.replace(f"WorkingDirectory={_TREE}\n", "WorkingDirectory=/run/prism\n")
        service = PurePosixPath(path).stem.removeprefix("prism-").replace("@", "-0")
        least = needed.get(service, 0)
        text = _STOP.sub(lambda found, least=least: f"TimeoutStopSec={max(int(found[1]), least)}s", text)  # type: ignore[misc]
        made[f"{UNITS}/{PurePosixPath(path).name}"] = text
    return {**texts, **made}
