"""The last commit that spoke protocol 1.0, as a tree beside this one whose services can be run."""

from __future__ import annotations

import subprocess
from pathlib import Path

import grpc_tools.protoc

ROOT = Path(__file__).resolve().parents[2]
COMMIT = "b1e418f46e75c1ad96dea6c096010c44f787a15a"


def there() -> bool:
    """Whether the repository is here and goes back that far."""
    asked = subprocess.run(["git", "-C", ROOT, "cat-file", "-e", f"{COMMIT}^{{commit}}"], capture_output=True)
    return asked.returncode == 0


def unpack(folder: Path) -> None:
    """Into `folder`, with its generated code."""
    archive = subprocess.run(["git", "-C", ROOT, "archive", COMMIT], capture_output=True, check=True).stdout
    subprocess.run(["tar", "-x", "-C", folder], input=archive, check=True)
    files = sorted(str(each.relative_to(folder)) for each in (folder / "protos").glob("*.proto"))
    out = [f"--{kind}={folder}" for kind in ("python_out", "grpc_python_out")]
    if grpc_tools.protoc.main(["protoc", f"-I{folder}", *out, *files]):
        raise RuntimeError("protoc failed")


def runs(folder: Path) -> tuple[str, ...]:
    """What to run a service of it under (`deploy.local.topology.Process.under`)."""
    return ("env", "--chdir", str(folder), f"PYTHONPATH={folder}")
