#!/bin/sh
# What one GPU shows of whether engines say the same and what elastic memory costs, for longer than one call of a
# machine may last, after setup.sh:
#   SRC=... SITE=... RESULTS=... sh one.sh begin
#   SRC=... SITE=... RESULTS=... sh one.sh look SECONDS
# `begin` starts it in processes that outlive the shell (some 1,000 s). `look` waits until it is done, or so long, and
# shows what has been said so far.
set -u
. "$(dirname "$0")/run.sh"
SELF=$SRC/benchmarks/gpu/offline/one.sh

case $1 in
    begin)
        rm -f "$RESULTS/one.ended"
        setsid nohup sh "$SELF" all >"$RESULTS/one.log" 2>&1 </dev/null &
        ;;
    all)
        # One after the other: two at once fill the card, and an engine of theirs dies.
        for seed in 1 2; do TAIL=14 bench same_answers_$seed 330 same_answers --seed $seed; done
        for shape in 8b 1b 3b; do TAIL=14 bench batches_$shape 220 batches --shape $shape; done
        TAIL=14 bench overhead_two 240 overhead --parts two --precedence 50 --loads 28:5,full:6
        TAIL=14 bench overhead_one 200 overhead --parts one --loads full:5
        TAIL=20 bench reclaim 150 reclaim
        touch "$RESULTS/one.ended"
        ;;
    look)
        until=$(($(date +%s) + $2))
        while [ ! -e "$RESULTS/one.ended" ] && [ "$(date +%s)" -lt "$until" ]; do sleep 1; done
        cat "$RESULTS/one.log"
        ;;
    *) echo "begin or look, not $1" >&2; exit 2 ;;
esac
