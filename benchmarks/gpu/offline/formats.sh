#!/bin/sh
# Classes and formats beside unmodified SGLang on one GPU (benchmarks.gpu.formats), after setup.sh; 12 minutes with
# kernels that are compiled already, 60 GB of disk:
#   SRC=... SITE=... RESULTS=... sh formats.sh small     every class and format, small: 5 minutes
#   SRC=... SITE=... RESULTS=... sh formats.sh shapes    gpt-oss-20b, Qwen3-30B-A3B in FP8 and a small one share the GPU,
#                                                        20 times asleep and awake each: 5 minutes
#   SRC=... SITE=... RESULTS=... sh formats.sh beside    steps and first tokens beside SGLang's own: 2 minutes a shape
set -u
. "$(dirname "$0")/run.sh"
FOLDERS=${FOLDERS:-/tmp/checkpoints}
mkdir -p "$FOLDERS"
case $1 in
    small)
        bench formats_small 300 formats --folders "$FOLDERS" --together 5 --cases "$(python3 -c "
from benchmarks.gpu.formats import CASES
from loader.checkpoints.classes import CLASSES
from testing.small_checkpoints import CLASSES as SMALL
mixtures = ('qwen3-moe:int4', 'qwen3-moe:awq', 'qwen3-moe:gptq', 'mixtral:fp8-channels', 'qwen3:bf16:fp8')
unseen = [f'{name}:small' for name in SMALL if 'GPU' not in CLASSES[name].verified]
print(','.join([*CASES, *mixtures, *unseen]))")"
        ;;
    shapes)
        cases=qwen3-30b-a3b:fp8-blocks,gpt-oss-20b:mxfp4,llama:awq
        bench formats_shapes 300 formats --folders "$FOLDERS" --together 3 --naps 20 --shared 12 --cases $cases
        ;;
    beside)
        for each in gpt-oss-20b-mxfp4 qwen3-30b-a3b-fp8-blocks; do
            bench "overhead_$each" 170 overhead --folder "$FOLDERS/$each" \
                --loads 24 --windows 12 --window 2 --lead-in 2 --kv-gib 6
        done
        ;;
    *) echo "small, shapes or beside, not $1" >&2; exit 2 ;;
esac
