#!/bin/sh
# Prism over HTTP beside SGLang's own server, on a host of one GPU that one has for 20 minutes, in a tree that came
# there without .git:
#   sh http.sh first PACK             what pack.sh made is put in place; the time counts
#   sh http.sh begin [WORD...]        after the parts of SGLang's archive lie in /tmp/b/0, /tmp/b/1, ...: unpacks them,
#                                     says what is missing and fails then, and begins what is to be measured, in
#                                     processes that outlive the shell
#   sh http.sh look SECONDS OUT       waits until all is done, or so long; results so far come to OUT, in a few files
# Words are what is measured, in this order; each may have a number of rounds (8b:6):
#   fresh     8B, nothing compiled yet: what still runs in the first windows (250 s). It leaves the kernels for the
#             others
#   8b        8B, all loads (480 s with four rounds, 680 with six; 90 more where kernels are to be compiled)
#   start     two starts of make serve with 8B and a request at once, nothing compiled before the first (150 s, and 20
#             for the checkpoint); alone: WORDS of the other kinds are not there yet, or have ended
#   135m      SmolLM2's shape, or SMOLLM2=FOLDER a real one (330 s with four rounds)
# MORE="--rehearse ..." are arguments after all others. An archive made by zstd needs its program and liblz4.so.1 in
# /tmp/c.
set -eu
IN=${IN:-/tmp/in} PARTS=${PARTS:-/tmp/b} TOOLS=${TOOLS:-/tmp/c}
WORK=${WORK:-/tmp} # checkpoints and compiled kernels, 30 GB
export SRC=${SRC:-/tmp/src} SITE=${SITE:-/tmp/site} RESULTS=${RESULTS:-/tmp/results}
ENDS_S=${ENDS_S:-1170} # after `first`
SELF=$SRC/benchmarks/gpu/offline/http.sh
BEGUN=$RESULTS/begun

# measured NAME LIMIT ROUNDS [ARGUMENT...]: bounded by what is left of the time, too; its JSON lies in RESULTS/http_NAME
measured() {
    name=$1 limit=$2 rounds=$3
    shift 3
    left=$(($(cat "$BEGUN") + ENDS_S - $(date +%s)))
    [ "$limit" -lt "$left" ] || limit=$left
    if [ "$limit" -lt 120 ]; then echo "== $name: no time left" && return; fi
    # Stopping both servers takes seconds, after which the results are written once more.
    TAIL=40 bench "http_$name" "$limit" http_beside_sglang --rounds "$rounds" --limit-s $((limit - 40)) \
        --folders "$WORK/models" --caches "$WORK/caches" "$@" ${MORE:-}
}

case $1 in
    first)
        mkdir -p "$IN" "$PARTS" "$RESULTS"
        date +%s >"$BEGUN"
        cp -r "$2"/. "$IN"
        nvidia-smi -L
        ;;
    begin)
        if [ -x "$TOOLS/zstd" ]; then export UNPACK="env LD_LIBRARY_PATH=$TOOLS $TOOLS/zstd -dc"; fi
        # In order of their numbers, whatever those are.
        sh "$(dirname "$0")/setup.sh" "$IN" "$SRC" "$SITE" $(ls -v "$PARTS"/*)
        (. "$SRC/benchmarks/gpu/offline/run.sh" && python3 -m benchmarks.gpu.http_beside_sglang --check ${MORE:-})
        shift
        [ $# -gt 0 ] || set -- fresh:2 8b:4 135m:4
        rm -f "$RESULTS/http.ended"
        setsid nohup sh "$SELF" all "$@" >"$RESULTS/http.log" 2>&1 </dev/null &
        echo "begun $(($(date +%s) - $(cat "$BEGUN"))) s after the first call"
        ;;
    all)
        shift
        . "$SRC/benchmarks/gpu/offline/run.sh"
        set +e
        for word in "$@"; do
            what=${word%%:*} rounds=${word#*:}
            case $what in
                fresh) [ "$rounds" != "$word" ] || rounds=2
                    rm -rf "$WORK/caches"
                    measured fresh 330 "$rounds" --models 8b --loads 16,32 --fresh ;;
                8b) [ "$rounds" != "$word" ] || rounds=4
                    measured 8b 800 "$rounds" --models 8b ;;
                135m) [ "$rounds" != "$word" ] || rounds=4
                    measured 135m 420 "$rounds" --models "135m${SMOLLM2:+=$SMOLLM2}" --loads 16,32,x400 ;;
                start) TAIL=60 bench http_start 240 first_start --limit-s 160 --folders "$WORK/models" ;;
                *) echo "fresh, 8b, start or 135m, not $word" ;;
            esac
        done
        touch "$RESULTS/http.ended"
        ;;
    look)
        until=$(($(date +%s) + $2))
        while [ ! -e "$RESULTS/http.ended" ] && [ "$(date +%s)" -lt "$until" ]; do sleep 1; done
        cat "$RESULTS/http.log"
        for each in "$RESULTS"/http_*/*.json; do
            if [ -e "$each" ]; then cp "$each" "$3"; fi
        done
        (cd "$RESULTS" && find . -name '*.log' -o -name log -o -name '*.logs.txz' | tar -czf "$3/http_logs.tgz" -T -)
        echo "$(($(date +%s) - $(cat "$BEGUN"))) s after the first call"
        ;;
    *) echo "first, begin or look, not $1" >&2; exit 2 ;;
esac
