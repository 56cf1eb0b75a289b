#!/bin/sh
# The comparison of systems on two GPUs, on two pairs of them at once where there are four, for longer than one call of a
# machine may last. After setup.sh, with the slices of pack.sh in SRC/slices:
#   SRC=... SITE=... RESULTS=... sh compare.sh begin SECONDS [SYSTEM:SLICE:RATE ...]
#   SRC=... SITE=... RESULTS=... sh compare.sh look SECONDS
# `begin` goes on where RESULTS/compare (slos.json and results of an earlier time may be put there) ends, in processes that
# outlive the shell, and begins nothing that would not be done after so many seconds. `look` waits until they are done, or
# so long, and says what there is.
set -u
. "$(dirname "$0")/run.sh"
OUT_OF_ALL=$RESULTS/compare
mkdir -p "$OUT_OF_ALL"
ARGUMENTS="--traces $SRC/slices --out $OUT_OF_ALL --commit $COMMIT"
GPUS=$(nvidia-smi -L | wc -l) CORES=$(nproc)

case $1 in
    begin)
        end=$(($(date +%s) + $2))
        shift 2
        pairs=$((GPUS / 2)) patterns=$*
        {
            echo "[ -e $OUT_OF_ALL/slos.json ] || timeout 500 python3 -m benchmarks.gpu.compare calibrate $ARGUMENTS"
            for pair in $(seq 1 $pairs); do
                first=$(((pair - 1) * CORES / pairs)) last=$((pair * CORES / pairs - 1))
                devices=cuda:$((2 * pair - 2)),cuda:$((2 * pair - 1))
                echo "taskset -c $first-$last python3 -m benchmarks.gpu.compare run $patterns $ARGUMENTS --part $pair/$pairs" \
                    "--devices $devices --limit-s \$(($end - \$(date +%s))) >$OUT_OF_ALL/log.$pair 2>&1 &"
            done
            echo "wait; touch $OUT_OF_ALL/ended"
        } >"$OUT_OF_ALL/commands"
        rm -f "$OUT_OF_ALL/ended"
        setsid nohup sh "$OUT_OF_ALL/commands" >"$OUT_OF_ALL/log" 2>&1 </dev/null &
        ;;
    look)
        until=$(($(date +%s) + $2))
        while [ ! -e "$OUT_OF_ALL/ended" ] && [ "$(date +%s)" -lt "$until" ]; do sleep 1; done
        tail -n 3 "$OUT_OF_ALL"/log*
        python3 -m benchmarks.gpu.compare show --out "$OUT_OF_ALL"
        ;;
    *) echo "begin or look, not $1" >&2; exit 2 ;;
esac
