#!/bin/sh
# For a GPU host that reaches no package registry: the committed tree with its generated code, and the wheels that such
# a host lacks, as OUT/prism.tgz and OUT/wheels/. SGLang and its kernels come there as an archive of their own.
#   benchmarks/gpu/offline/pack.sh OUT [PYTHON] [TRACES]
# PYTHON: of the environment that `make env` made. TRACES: a folder of whole traces; the slices that
# benchmarks.gpu.compare replays then go along, as slices/ of the archive, and what benchmarks.gpu.stairs needs, as
# stairs/. OTHER=COMMIT in the environment: OUT/other.tgz has what that commit has otherwise, to be measured beside HEAD
# on the same host (compare.sh); HEAD itself where it is systems that are to be measured at the same seconds, in either
# order.
set -eu
out=$1 python=${2:-.venv/bin/python} traces=${3:+$(cd "$3" && pwd)}
cd "$(dirname "$0")/../../.."
tree=$(mktemp -d)
trap 'rm -rf "$tree"' EXIT
mkdir -p "$out/wheels"
git archive HEAD | tar -x -C "$tree"
rm -rf "$tree/benchmarks/results" && mkdir "$tree/benchmarks/results"
git rev-parse HEAD >"$tree/COMMIT"
python_abs=$(cd "$(dirname "$python")" && pwd)/$(basename "$python")
(cd "$tree" && "$python_abs" -m grpc_tools.protoc -I . --python_out=. --pyi_out=. --grpc_python_out=. protos/*.proto)
if [ -n "$traces" ]; then
    (cd "$tree" && "$python_abs" -m benchmarks.gpu.compare cut --traces "$traces" --to slices &&
        "$python_abs" -m benchmarks.gpu.stairs cut --traces "$traces" --to stairs)
fi
# SGLang finds the plugin by the distribution's metadata.
"$python_abs" -P - "$tree" <<'METADATA'
import importlib.metadata, pathlib, sys
found = importlib.metadata.distribution("prism-serve")
folder = pathlib.Path(sys.argv[1]) / f"prism_serve-{found.version}.dist-info"
folder.mkdir()
for name in ("METADATA", "entry_points.txt"):
    (folder / name).write_text(found.read_text(name))
METADATA
"$python_abs" -m pip download --quiet --no-deps --only-binary=:all: --python-version 3.12 --implementation cp \
    --platform manylinux_2_28_x86_64 --platform manylinux_2_17_x86_64 --platform manylinux2014_x86_64 \
    -d "$out/wheels" httptools==0.9.0 pytest-asyncio==1.5.0 structlog==26.1.0 tomli_w==1.2.0 \
    limits==5.8.0 deprecated==1.3.1 wrapt==2.5.2 \
    fastsafetensors==0.5.0 runai-model-streamer==0.16.1
tar -C "$tree" -czf "$out/prism.tgz" .
rm -f "$out/other.tgz"
if [ -n "${OTHER:-}" ]; then
    other=$(mktemp -d)
    trap 'rm -rf "$tree" "$other"' EXIT
    git diff --name-only --diff-filter=d HEAD "$OTHER" -- ':!benchmarks/results' ':!docs' ':!protos' >"$other/.names"
    if [ -s "$other/.names" ]; then git archive "$OTHER" $(cat "$other/.names") | tar -x -C "$other"; fi
    git rev-parse "$OTHER" >"$other/COMMIT"
    tar -C "$other" --exclude=.names -czf "$out/other.tgz" .
fi
ls -l "$out"
