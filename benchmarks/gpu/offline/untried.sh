#!/bin/sh
# Runs what no GPU has seen yet, the most important first, on a host of one or two GPUs that one has for half an hour,
# in a tree that came there without .git:
#   sh untried.sh first PACK          what pack.sh made is put in place; the time counts
#   sh untried.sh begin [WORD...]     after the parts of SGLang's archive lie in /tmp/b/0, /tmp/b/1, ...: unpacks them,
#                                     says what is missing and fails then, and begins the rest in processes that outlive
#                                     the shell. Words after a `/` are for the next GPU, which has cores of its own
#   sh untried.sh look SECONDS OUT    waits until all is done, or so long; logs and results so far come to OUT, in two
#                                     files
# Each word is bounded by what is left of the time. Where nothing is said, one GPU runs beside_kinds and engines.
#   state_kernels   kernels of states over addresses that are mapped in part
#   state_strides   what the distance between states costs a decode step
#   states    the classes with states, small, beside unmodified SGLang
#   formats   every class and format, small, beside unmodified SGLang
#   overhead  one engine beside SGLang's own scheduler
#   kinds     models with states, windows and latent rows in published shapes, together on the GPU, 20 times asleep
#   beside_kinds   steps and first tokens of these, beside SGLang's own scheduler.
#                  beside=NAME:REQUESTS_PER_S:IN_FLIGHT:KV_GIB: those of one (formats.sh)
#   shapes    published shapes in formats of their own, gpt-oss-20b in MXFP4 among them, together on the GPU, 20 times
#             asleep; SHAPES in the environment says which others (formats.sh)
#   written=NAME   steps and first tokens of a checkpoint that `shapes` wrote, beside SGLang's own scheduler
#   shared    the same with prompts that share their first 1,024 of 1,280 tokens, of a model with states
#   where, where=NAME:...   where the time of steps goes: of an 8B model, and of one of those
#   engines   the tests of engines, moves, private memory, encoders and adapters, three at once: each has a balloond
#             with a GiB of its own or a system that takes what it needs, and the device tells the memory of each
#             process. engines=NAME,...: those of tests/gpu/test_NAME.py
#   serve     the test of a whole system, alone: it counts the device's free memory
#   http      an 8B model over HTTP beside SGLang's own server
#   batches, same_answers, reclaim, residency    the program of that name
# REHEARSE=1: without a GPU, where tests are only collected. An archive made by zstd needs its program and liblz4.so.1
# in /tmp/c.
set -eu
IN=${IN:-/tmp/in} PARTS=${PARTS:-/tmp/b} TOOLS=${TOOLS:-/tmp/c}
WORK=${WORK:-/tmp} # checkpoints, 60 GB
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

# of_formats WORD SECONDS LEAST [MODEL]
of_formats() {
    bounded "$2" "$3" && LIMIT=$limit BESIDE=${4:-} FOLDERS=$WORK/checkpoints sh "$SRC/benchmarks/gpu/offline/formats.sh" "$1"
}

# lane NUMBER LANES [WORD...]: on the GPU of that number, and its part of the cores that this process may use
lane() {
    cores=$(python3 -c "
import os, sys
number, lanes = map(int, sys.argv[1:])
mine = sorted(os.sched_getaffinity(0))
share = max(1, len(mine) // lanes)
print(*mine[number * share : (number + 1) * share] or mine, sep=',')" "$1" "$2")
    gpu=$1
    shift 2
    CUDA_VISIBLE_DEVICES=$gpu taskset -c "$cores" sh "$SELF" words "$@"
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
        [ $# -gt 0 ] || set -- beside_kinds engines
        lanes=1
        for word in "$@"; do if [ "$word" = / ]; then lanes=$((lanes + 1)); fi; done
        number=0 words=
        for word in "$@" /; do
            if [ "$word" != / ]; then words="$words $word" && continue; fi
            # shellcheck disable=SC2086  # words
            lane "$number" "$lanes" $words &
            number=$((number + 1)) words=
        done
        wait
        touch "$RESULTS/untried.ended"
        ;;
    words)
        shift
        . "$SRC/benchmarks/gpu/offline/run.sh"
        set +e
        for word in "$@"; do
            case $word in
                engines)
                    # Each has an engine of its own, so files need not stay together.
                    gpu_tests engines 700 -n 3 --dist load --maxschedchunk 1 --max-worker-restart 0 tests/gpu/test_engine.py \
                        tests/gpu/test_moving.py tests/gpu/test_private_memory.py tests/gpu/test_encoder.py \
                        tests/gpu/test_adapters.py ;;
                engines=*)
                    files=$(echo "${word#*=}" | tr , '\n' | sed 's#.*#tests/gpu/test_&.py#')
                    # shellcheck disable=SC2086  # words
                    gpu_tests "engines_${word#*=}" 200 -n 3 --dist load --maxschedchunk 1 --max-worker-restart 0 $files ;;
                state_kernels) bounded 120 60 && bench state_kernels "$limit" state_kernels ;;
                state_strides) bounded 150 60 && TAIL=20 bench state_strides "$limit" state_strides ;;
                states) of_formats states 300 150 ;;
                formats) of_formats small 440 200 ;;
                kinds) of_formats kinds 360 200 ;;
                beside_kinds) of_formats beside_kinds 1000 600 ;;
                beside=*) of_formats beside_kinds 360 120 "${word#*=}" ;;
                shapes) of_formats shapes 420 200 ;;
                written=*) WRITTEN=${word#*=} of_formats beside 360 120 ;;
                shared)
                    bounded 260 120 && TAIL=16 bench shared "$limit" overhead --drawn qwen3.6-35b-a3b@20 --loads 16 \
                        --in-flight 48 --kv-gib 9 --prompt 1280 --shared 1024 --windows 12 --window 4 --lead-in 8 ;;
                where) bounded 120 70 && TAIL=90 bench where "$limit" where --loads 28 --recorders stages,python ;;
                where=*) of_formats where 150 100 "${word#*=}" ;;
                serve) gpu_tests serve 120 -p no:xdist tests/gpu/test_serve.py ;;
                overhead)
                    bounded 330 200 && TAIL=40 bench overhead "$limit" overhead --windows 12 --window 2 --lead-in 2 \
                        --loads 28,full ;;
                http)
                    bounded 420 200 && TAIL=40 bench http "$limit" http_beside_sglang --models 8b --rounds 3 \
                        --limit-s $((limit - 40)) --folders "$WORK/models" ;;
                batches) bounded 220 120 && TAIL=14 bench batches "$limit" batches --shape 8b ;;
                same_answers) bounded 330 200 && TAIL=14 bench same_answers "$limit" same_answers ;;
                reclaim) bounded 150 80 && TAIL=20 bench reclaim "$limit" reclaim ;;
                residency)
                    bounded 300 150 && TAIL=40 bench residency "$limit" residency --shapes 8b 1b --cycles 10 ;;
                *) echo "$word is no word: they are named at the head of $SELF" ;;
            esac
        done
        ;;
    look)
        until=$(($(date +%s) + $2))
        while [ ! -e "$RESULTS/untried.ended" ] && [ "$(date +%s)" -lt "$until" ]; do sleep 1; done
        cat "$RESULTS/untried.log" || true
        out=$(cd "$3" && pwd)
        cd "$RESULTS"
        find . -name '*.json' | tar -czf "$out/untried.tgz" -T -
        find . -name '*.log' -o -name log | tar -czf "$out/untried_logs.tgz" -T -
        echo "$(($(date +%s) - $(cat "$BEGUN"))) s after the first call"
        ;;
    *) echo "first, begin or look, not $1" >&2; exit 2 ;;
esac
