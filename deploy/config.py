"""`prism config`: one file, prism.toml, that describes a node (examples/prism.toml shows it)."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path, PurePosixPath

from deploy import places
from deploy.local.bundled import BUNDLED
from deploy.local.devices import first
from deploy.node.description import DeviceGroup, NodeDescription
from deploy.node.reading import read
from deploy.node.render import HEAD, SHIPPED, next_steps, render
from deploy.node.schema import schema
from deploy.node.targets import RUN, SERVE, TARGETS, RenderTarget
from loader.catalogue.catalogue import CatalogueEntry
from loader.catalogue.models import Sizes, read_model
from loader.config import LoaderConfig
from services.errors import Invalid, PrismError
from services.wording.plurals import counted
from services.wording.sizes import size

_FILE = "prism.toml"
_SERVE = "serve"


def say(text: str) -> None:
    print(text, flush=True)


def _warn(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def main(arguments: list[str] | None = None, prog: str = "python -m deploy.config") -> int:
    parser = argparse.ArgumentParser(prog=prog, description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    check = commands.add_parser("check", help="say what is wrong with the file, or what it was understood to be")
    check.add_argument("--to", choices=(_SERVE, *TARGETS), default=_SERVE, help="for what (default: prism serve)")
    making = commands.add_parser("render", help="make the files of systemd, compose or Kubernetes from it")
    making.add_argument("--to", choices=tuple(TARGETS), required=True)
    making.add_argument("--out", type=Path, required=True, metavar="DIR", help="folder for the files")
    making.add_argument("--force", action="store_true", help="write over files that differ")
    for command in (check, making):
        command.add_argument(
            "file", nargs="?", type=Path, default=Path(_FILE), metavar="FILE", help=f"left out: {_FILE}"
        )
    commands.add_parser("schema", help="print the JSON schema of the file, for editors")
    options = parser.parse_args(arguments)
    try:
        if options.command == "schema":
            say(json.dumps(schema(), indent=2, ensure_ascii=False))
            return 0
        if options.command == "check":
            return _check(options.file, options.to)
        return _render(options.file, options.to, options.out, options.force)
    except PrismError as error:
        print(error, file=sys.stderr, flush=True)
        return 1


def _check(file: Path, to: str) -> int:
    target = SERVE if to == _SERVE else TARGETS[to]
    node = read(file, target, _warn)
    here = first() if target is SERVE and not node.devices else ""
    if here:
        node = node.model_copy(update={"devices": [DeviceGroup(name=here)]})
    models, refused = [], 0
    for entry in node.entries():
        text, ok = _model(CatalogueEntry(**entry), _sizes(node, target), node, target)
        models.append(text)
        refused += not ok
    say(f"{file}: a node for {'prism serve' if target is SERVE else to}")
    if target is SERVE and node.keys_file and not Path(node.keys_file).is_file():
        say(f"  keys      refused: there is no file {node.keys_file}")
        refused += 1
    for head, lines in _understood(node, target, models, here):
        for number, line in enumerate(lines):
            say(f"  {'' if number else head:<9} {line}")
    return 1 if refused else 0


def _understood(
    node: NodeDescription, target: RenderTarget, models: list[str], here: str
) -> Iterator[tuple[str, list[str]]]:
    """(what, its lines) of a description. `here`: the device that was found on this machine, if the description has
    none."""
    settings = {service.name: service.settings for service in target.services(node)}
    yield "devices", [f"{here}: the first GPU, or cpu without one" if here else node.wanted or "cuda:0"]
    yield "models", models or ["none; three tiny ones are served" if target is SERVE else "none: prismctl models add"]
    yield "HTTP", [node.http]
    listen = settings["gateway"]["listen"]
    if target is SERVE:
        listen = listen.replace(RUN, node.state or str(places.state()))
    yield "gRPC", [listen]
    if metrics := [each["metrics"] for each in settings.values() if "metrics" in each]:
        yield "metrics", [", ".join(dict.fromkeys(metrics))]
    yield "keys", [node.keys_file or "none: whoever reaches the gateway may ask (docs/operate/security.md)"]
    if node.nodes:
        yield "nodes", [", ".join(node.nodes)]


def _model(entry: CatalogueEntry, sizes: Sizes, node: NodeDescription, target: RenderTarget) -> tuple[str, bool]:
    """(what was found in a model's folder, whether it can be served or cannot be known)."""
    targets = [f"{key} {value}" for key in ("ttft_ms", "tpot_ms") if (value := getattr(entry, key))]
    if not Path(entry.path).exists():
        model = next(each for each in node.models if each.called == entry.name)
        if target is SERVE and model.path in BUNDLED:
            where = f"{model.path}, which prism serve makes"
        elif model.hub_model:
            where = f"{model.hub_model} of the Hugging Face hub"
        elif target is SERVE:
            return f"{entry.name}: refused: there is no folder {entry.path}", False
        else:
            where = f"{entry.path}, which is not on this machine"
        return ", ".join([f"{entry.name}: {where}", *targets]), True
    found = read_model(entry, sizes)
    if found.error:
        return f"{entry.name}: refused: {found.error}", False
    if found.checkpoint is None:
        return ", ".join([f"{entry.name}: {entry.path}, an adapter of {entry.base}", *targets]), True
    needs = found.weights_bytes + found.floor_bytes + found.quota_bytes
    each = " on each device" if entry.devices > 1 else ""
    weights = f"{size(found.weights_bytes)} of weights, {size(needs)} in all{each}"
    return ", ".join([f"{entry.name}: {entry.path}, {weights}", *targets]), True


def _sizes(node: NodeDescription, target: RenderTarget) -> Sizes:
    """Sizes that the loader of the described node takes."""
    (loader,) = (each.settings for each in target.services(node) if each.kind == "loader")
    config = LoaderConfig.model_validate(loader)
    return Sizes(config.device_dtype_bytes, config.kv_extent_bytes, config.engine_quota_bytes)


def _render(file: Path, to: str, out: Path, force: bool) -> int:
    node = read(file, TARGETS[to], _warn)
    shipped = {name: (places.TREE / "deploy" / name).read_text() for name in SHIPPED[to]}
    made = render(node, to, shipped)
    try:
        kept = {path: old for path in made if (old := _text(out / path)) not in (None, made[path])}
        if kept and not force:
            raise Invalid(
                "\n".join(f"{out / path} is there and differs" for path in kept)
                + "\nnothing was written; --force writes over "
                + ("them" if len(kept) > 1 else "it")
            )
        for name, text in made.items():
            (out / name).parent.mkdir(parents=True, exist_ok=True)
            (out / name).write_text(text)
        left_over = _left_over(out, made)
    except OSError as error:
        raise Invalid(f"{error.filename}: {error.strerror}") from None
    for name in made:
        say(str(out / name))
    for path in left_over:
        say(f"{path} was made earlier and is no part of it any more: remove it")
    say(f"{counted(len(made), 'file')} of {file}. Next:\n")
    say("\n".join(f"  {line}" for line in next_steps(node, to, PurePosixPath(out.absolute()))))
    return 0


def _text(path: Path) -> str | None:
    """The text of a file; None if there is none."""
    return path.read_text(errors="replace") if path.exists() else None


def _left_over(out: Path, made: Mapping[str, str]) -> list[Path]:
    """Files of an earlier rendering, in the folders that a rendering has files in."""
    folders = {(out / path).parent for path in made}
    return [
        path
        for path in sorted(path for folder in folders for path in folder.iterdir())
        if path.suffix in (".toml", ".yaml") and str(path.relative_to(out)) not in made
        if path.is_file() and _begins(path, HEAD.encode())
    ]


def _begins(path: Path, head: bytes) -> bool:
    """Whether a file begins so; False for one that cannot be read."""
    try:
        with open(path, "rb") as file:
            return file.read(len(head)) == head
    except OSError:
        return False


if __name__ == "__main__":
    sys.exit(main())
