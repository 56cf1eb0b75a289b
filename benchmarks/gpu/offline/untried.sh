#!/bin/sh
# Runs what no GPU has seen yet (SGLang 0.5.23 with KV that lies token by token, kinds of KV), the most important first,
# on a host of one GPU that one has for half an hour, in a tree that came there without .git:
#   sh untried.sh first PACK          what pack.sh made is put in place; the time counts
#   sh untried.sh begin [WORD...]     after the parts of SGLang's archive lie in /tmp/b/0, /tmp/b/1, ...: unpacks them,
#                                     says what is missing and fails then, and begins the rest in processes that outlive
#                                     the shell
#   sh untried.sh look SECONDS OUT    waits until all is done, or so long; logs and results so far come to OUT
# Words, all of them in this order if nothing is said; each is bounded by what is left of the time:
#   formats   every class and format, small, beside unmodified SGLang
#   overhead  one engine beside SGLang's own scheduler
#   kinds     models with states, windows and latent rows in published shapes, together on the GPU, 20 times asleep
#   beside_kinds   steps and first tokens of these, beside SGLang's own scheduler
#   engines   the tests of engines, moves, private memory, encoders and adapters, three at once: each has a balloond
#             with a GiB of its own or a system that takes what it needs, and the device tells the memory of each
#             process
#   serve     the test of a whole system, alone: it counts the device's free memory
# REHEARSE=1: without a GPU, where tests are only collected. An archive made by zstd needs its program and liblz4.so.1
# in /tmp/c.
set -eu
IN=${IN:-/tmp/in} PARTS=${PARTS:-/tmp/b} TOOLS=${TOOLS:-/tmp/c}
WORK=${WORK:-/tmp} # a checkpoint, 16 GB
export SRC=${SRC:-/tmp/src} SITE=${SITE:-/tmp/site} RESULTS=${RESULTS:-/tmp/results}
ENDS_S=${ENDS_S:-1500} # after `first`; the host goes back a minute later
REHEARSE=${REHEARSE:-}
SELF=$SRC/benchmarks/gpu/offline/untried.sh
BEGUN=$RESULTS/begun
# Kernels may have to be compiled first.
export PRISM_TEST_START_S=300

# bounded SECONDS LEAST: sets `limit` to SECONDS or what is left of the time; fails where that is less than LEAST
bounded() {
    limit=$1
    left=$(($(cat "$BEGUN") + ENDS_S - $(date +%s)))
    [ "$limit" -lt "$left" ] || limit=$left
    if [ "$limit" -lt "$2" ]; then echo "== $word: no time left" && return 1; fi
}

# gpu_tests NAME SECONDS [ARGUMENT...]: no test may hang for longer than an engine may take to start
gpu_tests() {
    name=$1
    bounded "$2" 60 || return 0
    shift 2
    TAIL=70 tests "$name" "$limit" -v --durations=0 -o timeout=330 ${REHEARSE:+--collect-only} "$@"
}

case $1 in
    first)
        mkdir -p "$IN" "$PARTS" "$RESULTS"
        date +%s >"$BEGUN"
        cp -r "$2"/. "$IN"
        nvidia-smi -L
        ;;
    begin)
        if [ -x "$TOOLS/zstd" ]; then export UNPACK="env LD_LIBRARY_PATH=$TOOLS $TOOLS/zstd -dc --long=27"; fi
        # In order of their numbers, whatever those are.
        sh "$(dirname "$0")/setup.sh" "$IN" "$SRC" "$SITE" $(ls -v "$PARTS"/*)
        (. "$SRC/benchmarks/gpu/offline/run.sh" && python3 -m benchmarks.gpu.first_start --check --folders "$WORK/models" \
            ${REHEARSE:+--rehearse})
        shift
        rm -f "$RESULTS/untried.ended"
        setsid nohup sh "$SELF" all "$@" >"$RESULTS/untried.log" 2>&1 </dev/null &
        echo "begun $(($(date +%s) - $(cat "$BEGUN"))) s after the first call"
        ;;
    all)
        shift
        [ $# -gt 0 ] || set -- formats overhead kinds beside_kinds engines serve
        . "$SRC/benchmarks/gpu/offline/run.sh"
        set +e
        for word in "$@"; do
            case $word in
                engines)
                    # Each has an engine of its own, so files need not stay together.
                    gpu_tests engines 700 -n 3 --dist load --maxschedchunk 1 --max-worker-restart 0 tests/gpu/test_engine.py \
                        tests/gpu/test_moving.py tests/gpu/test_private_memory.py tests/gpu/test_encoder.py \
                        tests/gpu/test_adapters.py ;;
                formats)
                    bounded 420 200 && LIMIT=$limit FOLDERS=$WORK/checkpoints \
                        sh "$SRC/benchmarks/gpu/offline/formats.sh" small ;;
                kinds) bounded 360 200 && FOLDERS=$WORK/checkpoints sh "$SRC/benchmarks/gpu/offline/formats.sh" kinds ;;
                beside_kinds)
                    bounded 480 240 && FOLDERS=$WORK/checkpoints sh "$SRC/benchmarks/gpu/offline/formats.sh" beside_kinds ;;
                serve) gpu_tests serve 120 -p no:xdist tests/gpu/test_serve.py ;;
                overhead)
                    bounded 170 100 && TAIL=40 bench overhead "$limit" overhead --windows 12 --window 2 --lead-in 2 \
                        --loads 28,full ;;
                *) echo "formats, overhead, kinds, beside_kinds, engines or serve, not $word" ;;
            esac
        done
        touch "$RESULTS/untried.ended"
        ;;
    look)
        until=$(($(date +%s) + $2))
        while [ ! -e "$RESULTS/untried.ended" ] && [ "$(date +%s)" -lt "$until" ]; do sleep 1; done
        cat "$RESULTS/untried.log" || true
        for each in "$RESULTS"/*/*.json; do
            if [ -e "$each" ]; then cp "$each" "$3"; fi
        done
        (cd "$RESULTS" && find . -name '*.log' -o -name log | tar -czf "$3/untried_logs.tgz" -T -)
        echo "$(($(date +%s) - $(cat "$BEGUN"))) s after the first call"
        ;;
    *) echo "first, begin or look, not $1" >&2; exit 2 ;;
esac
