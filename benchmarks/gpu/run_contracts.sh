#!/bin/sh
# Every GPU measurement that the contracts rest on, one after another; a failing one does not stop the others.
#   benchmarks/gpu/run_contracts.sh OUT COMMIT [extents|token_path ...]
# Needs one NVIDIA GPU, python3 with torch 2.14 and cuda-bindings, and SGLang 0.5.23 with sglang-kernel on PYTHONPATH
# (for `extents` torch and cuda-bindings are enough).
set -u
out=$1
commit=$2
shift 2
[ $# -gt 0 ] || set -- extents token_path
cd "$(dirname "$0")/../.." || exit 1
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1
mkdir -p "$out"
status=0
for what in "$@"; do
    case $what in
        extents) module=extent_handoff ;;
        token_path) module=token_path ;;
        *) echo "unknown measurement: $what" >&2; exit 2 ;;
    esac
    begun=$(date +%s)
    timeout -k 5 240 python3 -m "benchmarks.gpu.$module" --out "$out" --commit "$commit" >>"$out/log.txt" 2>&1 || {
        echo "$what FAILED"
        tail -n 25 "$out/log.txt"
        status=1
    }
    echo "$what took $(($(date +%s) - begun)) s"
done
exit $status
