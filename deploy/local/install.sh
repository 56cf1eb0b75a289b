#!/bin/sh
# The pinned environment of a machine without a GPU, in $VENV. Called by `make env`; safe to repeat.
set -eu
: "${PYTHON:=python3}" "${VENV:=.venv}" "${TORCH:=torch==2.13.0}"
say() { printf '%s\n' "prism: $*"; }

"$PYTHON" - <<'CHECK' || exit 1
import sys
if not (3, 11) <= sys.version_info[:2] <= (3, 12):
    sys.exit(f"prism needs Python 3.11 or 3.12, not {sys.version.split()[0]}; name one with make PYTHON=python3.12")
CHECK
[ -x "$VENV/bin/python" ] || { say "making $VENV"; "$PYTHON" -m venv "$VENV"; }
pip="$VENV/bin/python -m pip install --quiet --disable-pip-version-check"
say "1/4 $TORCH (the largest part)"
$pip "$TORCH"
say "2/4 libraries"
$pip -r requirements/base.txt -r requirements/engine-cpu.txt
say "3/4 SGLang, without the CUDA packages that it names"
$pip --no-deps -r requirements/engine-cpu-nodeps.txt
say "4/4 tools for tests, and Prism itself"
$pip -r requirements/dev.txt
$pip --no-deps -e .
say "environment complete"
