#!/bin/sh
# On the host: what pack.sh made becomes SRC, and SRC.other where it made other.tgz; SGLang's archive (parts in numeric
# order) and the wheels become SITE. Compiled kernels of an earlier time, if IN/kernels.txz has them, go to their
# places. Safe to repeat. UNPACK in the environment: the command that unpacks an archive made by something else than xz.
#   sh setup.sh IN SRC SITE PART...
set -eu
in=$1 src=$2 site=$3
shift 3
rm -rf "$src" "$src.other" && mkdir -p "$src" "$site"
tar -xzf "$in/prism.tgz" -C "$src"
if [ -e "$in/other.tgz" ]; then cp -r "$src" "$src.other" && tar -xzf "$in/other.tgz" -C "$src.other"; fi
if [ ! -e "$site/.complete" ]; then
    # On all cores where it was packed in blocks (`xz --block-size`), half a minute quicker.
    cat "$@" | ${UNPACK:-xz -dc -T0} | tar -x -C "$site"
    python3 -m pip install --quiet --no-index --no-deps --no-compile --no-cache-dir --upgrade --target "$site" "$in"/wheels/*.whl
    # Imports of all classes would take a minute otherwise, in each process that is the first.
    python3 -m compileall -q -j 0 "$site" >"$site/.compileall" 2>&1 || true
    touch "$site/.complete"
fi
if [ -e "$in/kernels.txz" ] && [ ! -d "$HOME/.triton" ]; then tar -xJf "$in/kernels.txz" -C "$HOME"; fi
nvidia-smi --query-gpu=name,memory.used,driver_version --format=csv,noheader
# What a run would die of is better known now.
(cd "$src" && SRC=$src SITE=$site && . benchmarks/gpu/offline/environment.sh && python3 -c "import benchmarks.replay, gateway.app, gpu_scheduler.server, loader.server, placement.server, uvicorn")
