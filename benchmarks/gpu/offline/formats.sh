#!/bin/sh
# Classes and formats beside unmodified SGLang on one GPU (benchmarks.gpu.formats), after setup.sh; 12 minutes with
# kernels that are compiled already, 60 GB of disk:
#   SRC=... SITE=... RESULTS=... sh formats.sh small     every class and format, small, TOGETHER (10) at a time:
#                                                        5 minutes, and 3 more where kernels have to be compiled
#   SRC=... SITE=... RESULTS=... sh formats.sh states    the classes with states, one with latent rows and one with
#                                                        windows, small: 3 minutes with compiling
#   SRC=... SITE=... RESULTS=... sh formats.sh kinds     states, windows with a pool of their own and latent rows, in
#                                                        published shapes with fewer layers, share the GPU, 20 times
#                                                        asleep and awake each: 5 minutes. They need all of it
#   SRC=... SITE=... RESULTS=... sh formats.sh beside_kinds   steps and first tokens of these kinds beside SGLang's own,
#                                                        in whole models where two fit a GPU, 3 minutes a model.
#                                                        BESIDE says of which: NAME:REQUESTS_PER_S:IN_FLIGHT:KV_GIB
#   SRC=... SITE=... RESULTS=... sh formats.sh where     where the time of their steps goes, for the models of BESIDE
#   SRC=... SITE=... RESULTS=... sh formats.sh shapes    gpt-oss-20b, Qwen3-30B-A3B in FP8 and a small one share the
#                                                        GPU, 20 times asleep and awake each: 5 minutes. SHAPES says
#                                                        which others
#   SRC=... SITE=... RESULTS=... sh formats.sh beside    steps and first tokens of the checkpoints that `shapes` wrote,
#                                                        beside SGLang's own: 3 minutes a checkpoint. WRITTEN says of
#                                                        which
set -u
. "$(dirname "$0")/run.sh"
FOLDERS=${FOLDERS:-/tmp/checkpoints}
mkdir -p "$FOLDERS"
KINDS=${KINDS:-qwen3.6-27b@8 qwen3.6-35b-a3b@8 gemma-4-31b@6 deepseek-v2-lite@6}
# The weights are there twice, ours and SGLang's; neither lies on the disk.
BESIDE=${BESIDE:-qwen3.6-27b:3:12:11 qwen3.6-35b-a3b@20:24:48:9 gemma-4-31b@54:2.5:16:8 deepseek-v2-lite:24:64:5}
SHAPES=${SHAPES:-qwen3-30b-a3b:fp8-blocks,gpt-oss-20b:mxfp4,llama:awq}
WRITTEN=${WRITTEN:-gpt-oss-20b-mxfp4 qwen3-30b-a3b-fp8-blocks}
cases() { echo "$KINDS" | sed 's/ /:bf16,/g; s/$/:bf16/'; }

# beside MODULE MODEL [ARGUMENT...]: one of BESIDE, in its part of the time
beside() {
    module=$1 name=${2%%:*} load=$(echo "${2#*:}" | sed 's/:/ --in-flight /; s/:/ --kv-gib /')
    shift 2
    # shellcheck disable=SC2086  # words
    bench "${module}_$name" $((${LIMIT:-1000} / $(echo "$BESIDE" | wc -w))) "$module" --drawn "$name" --loads $load "$@"
}

case $1 in
    small)
        bench formats_small "${LIMIT:-420}" formats --folders "$FOLDERS" --together "${TOGETHER:-10}" --cases "$(python3 -c "
from benchmarks.gpu.formats import CASES
mixtures = ('qwen3-moe:int4', 'qwen3-moe:awq', 'qwen3-moe:gptq', 'mixtral:fp8-channels', 'qwen3:bf16:fp8')
print(','.join([*CASES, *mixtures]))")"
        ;;
    states)
        bench formats_states "${LIMIT:-300}" formats --folders "$FOLDERS" --together 8 --cases \
            qwen3.5:bf16,nemotron-h:bf16,qwen3.5-moe:bf16,qwen3-next:bf16,qwen3.5-images:bf16,qwen3.5-moe-images:bf16,deepseek-v2:bf16,gemma4:bf16
        ;;
    kinds)
        bench formats_kinds "${LIMIT:-360}" formats --folders "$FOLDERS" --together 4 --naps 20 --shared 12 --cases "$(cases)"
        ;;
    beside_kinds)
        for each in $BESIDE; do beside overhead "$each" --batches 1 4 16 --windows 12 --window 4 --lead-in 8; done
        ;;
    where)
        for each in $BESIDE; do beside where "$each" --recorders stages,python; done
        ;;
    shapes)
        bench formats_shapes "${LIMIT:-300}" formats --folders "$FOLDERS" --together 3 --naps 20 --shared 12 --cases "$SHAPES"
        ;;
    beside)
        for each in $WRITTEN; do
            bench "overhead_$each" $((${LIMIT:-500} / $(echo "$WRITTEN" | wc -w))) overhead --folder "$FOLDERS/$each" \
                --loads 24 --in-flight 64 --kv-gib 6 --batches 1 4 16 --windows 12 --window 4 --lead-in 8
        done
        ;;
    *) echo "small, states, kinds, beside_kinds, where, shapes or beside, not $1" >&2; exit 2 ;;
esac
