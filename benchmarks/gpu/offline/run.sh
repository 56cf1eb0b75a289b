# To be sourced on the host, after setup.sh:  SRC=... SITE=... RESULTS=... . run.sh
# Then, each with a limit in seconds, a folder of RESULTS for its log and JSON, and the log's end printed ($TAIL lines):
#   bench NAME LIMIT MODULE [ARGUMENT...]      a module of benchmarks.gpu
#   plain NAME LIMIT MODULE [ARGUMENT...]      one of benchmarks that takes --out FILE
#   tests NAME LIMIT [PYTEST ARGUMENT...]      GPU tests
# Several may run at once on GPUs of their own: CUDA_VISIBLE_DEVICES, and `taskset` for cores of their own.
cd "$SRC" || return 1
COMMIT=$(cat COMMIT)
. "$SRC/benchmarks/gpu/offline/environment.sh"
export PYTHONUNBUFFERED=1 COMMIT
# Programs that use NVLink multicast have put hosts out of service.
export NCCL_NVLS_ENABLE=0 TORCH_SYMM_MEM_DISABLE_MULTICAST=1 NVSHMEM_DISABLE_NVLS=1
ulimit -n "$(ulimit -Hn)"

limited() {
    name=$1 limit=$2
    shift 2
    mkdir -p "$RESULTS/$name"
    begun=$(date +%s)
    status=0
    timeout -s INT -k 8 "$limit" "$@" >"$RESULTS/$name/log" 2>&1 || status=$?
    printf '== %s: status %s, %s s\n' "$name" "$status" "$(($(date +%s) - begun))"
    tail -n "${TAIL:-25}" "$RESULTS/$name/log" | cut -c1-400
}

bench() {
    name=$1 limit=$2 module=$3
    shift 3
    limited "$name" "$limit" python3 -m "benchmarks.gpu.$module" --out "$RESULTS/$name" --commit "$COMMIT" "$@"
}

plain() {
    name=$1 limit=$2 module=$3
    shift 3
    mkdir -p "$RESULTS/$name"
    limited "$name" "$limit" python3 -m "benchmarks.$module" --out "$RESULTS/$name/$name.json" "$@"
}

tests() {
    name=$1 limit=$2
    shift 2
    limited "$name" "$limit" python3 -m pytest -q -m gpu -p no:cacheprovider "$@"
}
