#!/bin/sh
# What four GPUs of a host are needed for, and what they do four times as fast, in commands of less than ten minutes:
#   SRC=... SITE=... RESULTS=... sh four.sh links|beside|pairs|ranks
set -u
. "$(dirname "$0")/run.sh"
RUN=$SRC/benchmarks/gpu/offline/run.sh

# on GPU FIRST_CORE LAST_CORE COMMAND: in a shell of its own, with a GPU and cores of its own
on() {
    gpu=$1 cores=$2
    shift 2
    CUDA_VISIBLE_DEVICES=$gpu taskset -c "$cores" sh -c ". '$RUN'; $*"
}

case $1 in
    links) # nothing else runs: it is about the links (about 200 s)
        TAIL=12 plain load 120 load --device cuda:0 --links 1,2,4 --between cuda:1 --shapes 8b
        TAIL=60 bench load_calls 90 load_calls --links 4 --between cuda:1 --group cuda:0,cuda:1,cuda:2,cuda:3
        TAIL=9 plain load_group 150 load --group cuda:0,cuda:1,cuda:2,cuda:3 --shapes 70b/4 --repeat 4
        ;;
    beside) # those who decode while weights are loaded (about 120 s; 190 where kernels have to be compiled)
        TAIL=24 bench load_beside 260 load_beside --device cuda:1,cuda:0 --rounds 2 --seconds 3
        ;;
    pairs) # the same comparison on every GPU, each with its own requests (about 420 s)
        for gpu in 0 1 2 3; do
            on $gpu $((16 * gpu))-$((16 * gpu + 15)) \
                "bench overhead_$gpu 500 overhead --parts one --loads 28,32,full --windows 13 --seed $((gpu + 1))" &
        done
        wait
        python3 -m benchmarks.gpu.pooled "$RESULTS"/overhead_[0-3]/gpu_overhead_one.json --out "$RESULTS/pooled"
        ;;
    ranks) # a model that moves; then models of two and of four ranks (about 400 s)
        TAIL=16 bench migration 230 migration --rounds 2 &
        on 2,3 32-63 "TAIL=22 bench tensor_parallel_2 170 tensor_parallel --device cuda:0,cuda:1 --shape 8b" &
        wait
        TAIL=22 bench tensor_parallel_4 170 tensor_parallel --device cuda:0,cuda:1,cuda:2,cuda:3 --shape 8b
        TAIL=12 tests loader 60 tests/gpu/test_loader.py
        ;;
    *) echo "links, beside, pairs or ranks, not $1" >&2; exit 2 ;;
esac
