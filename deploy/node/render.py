"""The files that start the services of a described node, for each of the things that may start them. Pure: what is
shipped for one node (`deploy/compose`, `deploy/k8s`) is given as text, and is changed where the node differs."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from pathlib import PurePosixPath

import tomli_w

from deploy.hub.names import DEFAULT_REVISION
from deploy.node import compose, kubernetes, systemd
from deploy.node.description import DescribedModel, NodeDescription
from deploy.node.targets import TARGETS

HEAD = "# Made of prism.toml by `prism config render`: change that, and render it again.\n"
Files = dict[str, str]


def render(node: NodeDescription, to: str, shipped: Mapping[str, str]) -> Files:
    """Path -> text of the files for a target, for a description without faults. `shipped`: texts of the files that
    `SHIPPED` lists for it."""
    target = TARGETS[to]
    configs = {f"{service.name}.toml": service.settings for service in target.services(node)}
    configs["catalogue.toml"] = target.catalogue(node)
    texts = {name: HEAD + tomli_w.dumps(config) for name, config in configs.items()}
    made = {"systemd": systemd.files, "compose": compose.files, "kubernetes": kubernetes.files}[to](
        node, texts, shipped
    )
    return {path: text if text.startswith(HEAD) else HEAD + text for path, text in made.items()}


SHIPPED = {
    "systemd": systemd.SHIPPED,
    "compose": compose.SHIPPED,
    "kubernetes": kubernetes.SHIPPED,
}
"""Target -> files of `deploy` that `render` needs."""


def next_steps(node: NodeDescription, to: str, out: PurePosixPath) -> list[str]:
    """Command lines that follow the writing of the files in a folder (docs/operate/deploy.md)."""
    out = PurePosixPath(shlex.quote(str(out)))
    fetched = [f"{_download(node, model)}      # unless it is there" for model in node.models if model.hub_model]
    if to == "systemd":
        units = f"{out}/{systemd.UNITS}"
        scripts = shlex.quote(str(PurePosixPath(node.systemd.python).parent))
        steps = [
            f"install -m 644 -D -t /etc/prism {out}/*.toml",
            f"install -m 644 {units}/*.service {units}/prism.target /etc/systemd/system/",
            f"install -m 644 {units}/prism.sysusers.conf /usr/lib/sysusers.d/prism.conf && systemd-sysusers",
            f"install -m 644 {units}/prism.tmpfiles.conf /usr/lib/tmpfiles.d/prism.conf && "
            "systemd-tmpfiles --create prism.conf",
            "systemctl daemon-reload && systemctl enable --now prism.target",
            f"sudo -u prism {scripts}/prismctl --state /run/prism status",
        ]
    elif to == "compose":
        steps = [
            f"cd {out} && docker compose up -d      # its image: docs/operate/deploy.md",
            "docker compose exec placement python -m prismctl --state /run/prism status",
        ]
    else:
        keys = shlex.quote(f"{PurePosixPath(node.keys_file).name}={node.keys_file}")
        steps = [
            "kubectl label node NODE prism.node=true",
            f"kubectl apply -f {out}/00-namespace.yaml",
            *([f"kubectl -n prism create secret generic prism-keys --from-file={keys}"] if node.keys_file else ()),
            f"kubectl apply -f {out}",
            "kubectl -n prism exec deploy/prism-placement -- "
            "python -m prismctl --placement 127.0.0.1:7100 --loader prism-node:7002 status",
        ]
    return [*fetched, *steps]


def _download(node: NodeDescription, model: DescribedModel) -> str:
    hub = model.hub_model
    assert hub is not None
    revision = "" if hub.revision == DEFAULT_REVISION else f"--revision {hub.revision} "
    return f"hf download {hub.repository} {revision}--local-dir {shlex.quote(str(node.folder(model)))}"
