#!/usr/bin/env bash
# Every measurement of docs/PERFORMANCE.md, on the CPU: JSON files, the figure, and the tables as Markdown.
#
#     scripts/measure_performance.sh [FOLDER]      (default: performance_results; some 15 minutes on 2 quiet cores)
#
# Needs weights/smollm2-135m-instruct and weights/gemma-3-270m (scripts/fetch_weights.py) and the extras test and plot.
set -euo pipefail
cd "$(dirname "$0")/.."
folder=${1:-performance_results}
python=${PYTHON:-python}
smollm=weights/smollm2-135m-instruct
mkdir -p "$folder"

bench() {  # bench NAME, then options
    local name=$1
    shift
    [ -e "$folder/$name.json" ] || "$python" -m minipop.bench "$@" --json "$folder/$name.json"  # what is there is not measured again
}

bench 1-bfloat16 --ckpt $smollm --against transformers --plain-forms --compile --repeats 11 --decode-tokens 24 --figure "$folder/performance.png"
bench 2-float32 --ckpt $smollm --dtype float32 --against transformers --compile --repeats 3 --decode-tokens 24
bench 3-batches --ckpt $smollm --lengths 128,512 --batch 4 --ragged --repeats 3 --decode-tokens 24
bench 4-images --random weights/tiny-qwen3-vl --lengths 32 --image-sizes 256x256,320x240,480x320 --repeats 5 --decode-tokens 0
bench 5-long --ckpt weights/gemma-3-270m --lengths 512,2048,8192,32768 --warmup 0 --repeats 1 --decode-tokens 8 --decode-prompt 512,2048,8192,32000
"$python" scripts/performance_tables.py "$folder"/*.json | tee "$folder/tables.md"
