#!/bin/sh
# The comparison of systems on two GPUs, on two pairs of them at once where there are four, for longer than one call of
# a machine may last. After setup.sh, with the slices of pack.sh in SRC/slices:
#   SRC=... SITE=... RESULTS=... sh compare.sh begin SECONDS [[other] SYSTEM:SLICE:RATE ... [/ ...] [-- ...]]
#   SRC=... SITE=... RESULTS=... sh compare.sh look SECONDS
# What comes after `--` is for the next pair of GPUs, what comes after `/` for the same one afterwards; without any the
# systems are shared out. Where slices of these have no targets in slos.json yet, models are measured alone first.
# After `other` it is the tree SRC.other that is measured. Hosts differ, and so do their halves: what is to be compared
# like this is measured on both pairs, in either order, and each pair has folders of its own for both trees
# (compare_h200.1, compare_h200.other.1, ...).
# `begin` goes on where the folder of results ends (RESULTS/compare_h200 or RESULTS/compare_h100; slos.json and results
# of an earlier time may be put there), in processes that outlive the shell, and begins nothing that would not be done
# after so many seconds. `look` waits until they are done, or so long, and says what there is; it fails at once where
# nothing is under way and nothing was done.
#   MORE="--rehearse echo" GPUS=2    on a machine without them
set -u
. "$(dirname "$0")/run.sh"
name=compare_h200
if nvidia-smi -L 2>/dev/null | grep -q H100; then name=compare_h100; fi
OUT_OF_ALL=$RESULTS/$name
mkdir -p "$OUT_OF_ALL"
GPUS=${GPUS:-$(nvidia-smi -L | wc -l)} CORES=$(nproc)

# on NUMBER WHAT...: the command of one pair; of the other tree, if WHAT has the word
on() {
    number=$1
    shift
    tree=$SRC out=$OUT_OF_ALL commit=$COMMIT
    case "$* " in *" other "*) tree=$SRC.other out=$OUT_OF_ALL.other commit=$(cat "$SRC.other/COMMIT") ;; esac
    if [ -d "$SRC.other" ] && [ "$1" = run ]; then out=$out.$number; fi
    what=$(echo "$* " | sed 's/ other / /')
    of=$((GPUS / 2))
    first=$(((number - 1) * CORES / of)) last=$((number * CORES / of - 1))
    devices=cuda:$((2 * number - 2)),cuda:$((2 * number - 1))
    case ${MORE:-} in *rehearse*) devices=cpu:0,cpu:1 ;; esac
    echo "cd $tree && PYTHONPATH=$tree:$SITE taskset -c $first-$last python3 -m benchmarks.gpu.compare $what" \
        "--traces $SRC/slices --out $out --commit $commit --engine-log-level info ${MORE:-} --devices $devices"
}

# pair NUMBER [PATTERN ... [/ PATTERN ...]]: what one pair does, a line for each time that systems are begun with
pair() {
    number=$1
    shift
    echo "("
    echo "$*" | sed 's: / :\n:g' | while read -r patterns; do
        [ -n "$patterns" ] || patterns="--part $number/$((GPUS / 2))"
        echo "$(on "$number" run "$patterns") --limit-s \$(($end - \$(date +%s)))"
    done
    echo ") >$OUT_OF_ALL/log.$number 2>&1 &"
}

# targets WORD...: a line for each pair, which calibrate at once for the slices of all these
targets() {
    wanted=
    for word in "$@"; do
        case $word in -- | / | other) ;; *) wanted="$wanted $word" ;; esac
    done
    for number in $(seq 1 $((GPUS / 2))); do
        calibration=$(on "$number" calibrate "$wanted" --part "$number/$((GPUS / 2))")
        echo "timeout 700 sh -c '$calibration' >$OUT_OF_ALL/log.alone.$number 2>&1 &"
    done
    echo "wait; cd $SRC; python3 -m benchmarks.gpu.compare targets --out $OUT_OF_ALL --commit $COMMIT"
    if [ -d "$SRC.other" ]; then
        for number in $(seq 1 $((GPUS / 2))); do
            for of in "$OUT_OF_ALL.$number" "$OUT_OF_ALL.other.$number"; do
                echo "mkdir -p $of; cp $OUT_OF_ALL/slos.json $of/"
            done
        done
    fi
}

case $1 in
    begin)
        case " $* " in *" other "*) [ -d "$SRC.other" ] || { echo "there is no $SRC.other: OTHER of pack.sh" >&2; exit 2; } ;; esac
        end=$(($(date +%s) + $2))
        shift 2
        {
            echo "set -f"
            targets "$@"
            if [ $# -eq 0 ]; then
                for number in $(seq 1 $((GPUS / 2))); do pair "$number"; done
            else
                number=1 patterns=
                for word in "$@" --; do
                    if [ "$word" = -- ]; then
                        pair $number "$patterns"
                        number=$((number + 1)) patterns=
                    else
                        patterns="$patterns${patterns:+ }$word"
                    fi
                done
            fi
            echo "wait; touch $OUT_OF_ALL/ended"
        } >"$OUT_OF_ALL/commands"
        rm -f "$OUT_OF_ALL/ended"
        setsid nohup sh "$OUT_OF_ALL/commands" >"$OUT_OF_ALL/log" 2>&1 </dev/null &
        echo $! >"$OUT_OF_ALL/pid"
        ;;
    look)
        until=$(($(date +%s) + $2))
        while [ ! -e "$OUT_OF_ALL/ended" ]; do
            kill -0 "$(cat "$OUT_OF_ALL/pid" 2>/dev/null)" 2>/dev/null || { echo "nothing is under way" >&2; exit 1; }
            [ "$(date +%s)" -lt "$until" ] || break
            sleep 1
        done
        tail -n 3 "$OUT_OF_ALL"/log*
        for of in "$OUT_OF_ALL" "$OUT_OF_ALL".*; do
            if [ -d "$of" ]; then echo "$of" && python3 -m benchmarks.gpu.compare show --out "$of"; fi
        done
        ;;
    *) echo "begin or look, not $1" >&2; exit 2 ;;
esac
