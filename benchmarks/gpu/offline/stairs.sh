#!/bin/sh
# The staircase of rates (benchmarks/gpu/stairs.py) on a host of two or four GPUs that one has for half an hour, in a
# tree that came there without .git:
#   sh stairs.sh first PACK          what pack.sh made (with TRACES) is put in place; the time counts
#   sh stairs.sh begin [SYSTEM...]   after the parts of SGLang's archive lie in /tmp/b/0, /tmp/b/1, ...: unpacks them,
#                                    says what is missing and fails then, prints the plan, and begins the rest in
#                                    processes that outlive the shell
#   sh stairs.sh look SECONDS OUT    waits until all is done, or so long; logs and results so far come to OUT
# Systems: prism static muxserve, then prism again, as far as the time goes. On two GPUs they run one after the other.
# On four both pairs run at once, each with half of the cores: prism beside static, then exchanged, then muxserve beside
# prism.
#   ENDS_S=1740     seconds after `first` by which all is to be done
#   STEP_S=55       of a step, at most; steps are shorter where the first three systems would not fit
#   CORES=18        so many cores of the host are used, those with the lowest numbers; all if not said
# Kernels of an earlier host, as kernels.txz in PACK, save some 100 s of the first start. Results of an earlier host
# (halves and all), as results/ in PACK, are kept: what is there is not run again, and steps and targets are theirs.
#   REHEARSE=1      without a GPU, with the packages of PATH: this tree, echo engines, steps of STEP_S (5); PACK has
#                   what `stairs cut` wrote, as stairs/
set -eu
IN=${IN:-/tmp/in} PARTS=${PARTS:-/tmp/b} TOOLS=${TOOLS:-/tmp/c}
export SRC=${SRC:-/tmp/src} SITE=${SITE:-/tmp/site} RESULTS=${RESULTS:-/tmp/results}
ENDS_S=${ENDS_S:-1740}
REHEARSE=${REHEARSE:-}
STEP_S=${STEP_S:-$([ -n "$REHEARSE" ] && echo 5 || echo 55)}
SELF=$SRC/benchmarks/gpu/offline/stairs.sh
BEGUN=$RESULTS/begun
OUT_OF_ALL=$RESULTS/stairs
MORE="--step-s $STEP_S ${REHEARSE:+--rehearse echo}"

left() { echo $(($(cat "$BEGUN") + ENDS_S - $(date +%s))); }
gpus() { if [ -n "$REHEARSE" ]; then echo "${GPUS:-2}"; else nvidia-smi -L | wc -l; fi; }

# systems PAIR: what a pair of GPUs runs if nothing is said
systems() {
    case $(gpus)-$1 in
        [4-9]-1) echo prism static muxserve ;;
        [4-9]-2) echo static prism prism ;;
        *) echo prism static muxserve prism ;;
    esac
}

case $1 in
    first)
        mkdir -p "$IN" "$PARTS" "$RESULTS"
        date +%s >"$BEGUN"
        cp -r "$2"/. "$IN"
        if [ -n "$REHEARSE" ]; then
            mkdir -p "$SRC"
            cd "$(dirname "$0")/../../.."
            tar --exclude=./.venv --exclude=./.git --exclude=./benchmarks/results -cf - . | tar -x -C "$SRC"
            echo rehearsal >"$SRC/COMMIT"
        else
            nvidia-smi -L
        fi
        if [ -d "$IN/results" ]; then cp -r "$IN/results" "$OUT_OF_ALL"; fi
        ;;
    begin)
        shift
        if [ -z "$REHEARSE" ]; then
            if [ -x "$TOOLS/zstd" ]; then export UNPACK="env LD_LIBRARY_PATH=$TOOLS $TOOLS/zstd -dc --long=27"; fi
            # In order of their numbers, whatever those are.
            sh "$(dirname "$0")/setup.sh" "$IN" "$SRC" "$SITE" $(ls -v "$PARTS"/*)
        else
            # What pack.sh would have cut of the traces.
            rm -rf "$SRC/stairs" && cp -r "$IN/stairs" "$SRC/stairs"
        fi
        echo "unpacked, $(left) s left"
        of=$(($(gpus) / 2))
        (. "$SRC/benchmarks/gpu/offline/run.sh"
            python3 -m benchmarks.gpu.stairs check --traces "$SRC/stairs" --part "1/$of" $MORE
            python3 -m benchmarks.gpu.stairs plan --out "$OUT_OF_ALL" --limit-s "$(left)" $MORE ${*:-$(systems 1)})
        rm -rf "$OUT_OF_ALL/ended" "$OUT_OF_ALL/halves"
        setsid nohup sh "$SELF" all "$@" >"$RESULTS/stairs.log" 2>&1 </dev/null &
        echo $! >"$RESULTS/stairs.pid"
        echo "begun, $(left) s left"
        ;;
    all)
        shift
        . "$SRC/benchmarks/gpu/offline/run.sh"
        set +e
        of=$(($(gpus) / 2)) cores=${CORES:-$(nproc)}
        [ "$of" -le 2 ] || of=2
        # Kernels may have to be compiled first.
        export PRISM_TEST_START_S=300
        for pair in $(seq 1 $of); do
            kind=cuda
            [ -z "$REHEARSE" ] || kind=cpu
            own=$((cores / of))
            [ $own -gt 0 ] || own=1
            limit=$(left)
            timeout -s INT -k 20 $((limit + 10)) taskset -c $(((pair - 1) * own))-$((pair * own - 1)) \
                python3 -m benchmarks.gpu.stairs run --traces "$SRC/stairs" --out "$OUT_OF_ALL" --limit-s "$limit" \
                --commit "$COMMIT" --engine-log-level info --part "$pair/$of" \
                --devices "$kind:$((2 * pair - 2)),$kind:$((2 * pair - 1))" \
                $MORE ${*:-$(systems "$pair")} >"$OUT_OF_ALL/log.$pair" 2>&1 &
        done
        wait
        python3 -m benchmarks.gpu.stairs collect --out "$OUT_OF_ALL" --to "$RESULTS/staircase.json"
        touch "$OUT_OF_ALL/ended"
        ;;
    look)
        until=$(($(date +%s) + $2))
        mkdir -p "$3"
        while [ ! -e "$OUT_OF_ALL/ended" ] && [ "$(date +%s)" -lt "$until" ]; do
            kill -0 "$(cat "$RESULTS/stairs.pid")" 2>/dev/null || { echo "nothing is under way" >&2 && break; }
            sleep 1
        done
        . "$SRC/benchmarks/gpu/offline/run.sh"
        tail -n 12 "$OUT_OF_ALL"/log.* | cut -c1-200
        python3 -m benchmarks.gpu.stairs collect --out "$OUT_OF_ALL" --to "$RESULTS/staircase.json" || true
        if [ -e "$RESULTS/staircase.json" ]; then cp "$RESULTS/staircase.json" "$3"; fi
        (cd "$RESULTS" && find stairs -name '*.json' -o -name 'log.*' | tar -czf "$3/stairs.tgz" -T -)
        (cd "$OUT_OF_ALL" && find . -name '*.logs.txz' -size -15M) | while read -r path; do
            cp "$OUT_OF_ALL/$path" "$3/$(echo "$path" | cut -c3- | tr / -)"
        done
        if [ -d "$HOME/.triton" ]; then du -sh "$HOME/.triton"; fi
        echo "$(left) s left"
        ;;
    *) echo "first, begin or look, not $1" >&2; exit 2 ;;
esac
