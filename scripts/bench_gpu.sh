#!/usr/bin/env bash
# The paper's Table 2, time to first token of the full prefill over that of POP, with random weights in the shapes of its models.
#
#     scripts/bench_gpu.sh [FOLDER]      results go to FOLDER (default: gpu_results): a JSON file a model, and table.md
#
# Needs one GPU with 80 GB; no checkpoints. Settings from the environment, each with the paper's value as its default:
#     DEVICE BATCH LENGTHS IMAGE_SIZES REPEATS DTYPE    TEXT_SHAPES VISION_SHAPES (see bench --random)    PYTHON
set -euo pipefail
cd "$(dirname "$0")/.."
folder=${1:-gpu_results}
python=${PYTHON:-python}
mkdir -p "$folder"

bench() {  # bench SHAPE [more options]
    local shape=$1
    shift
    echo "== $shape"
    "$python" -m minipop.bench --random "$shape" --device "${DEVICE:-cuda}" --dtype "${DTYPE:-bfloat16}" --batch "${BATCH:-8}" \
        --lengths "${LENGTHS:-32,128,512,2048}" --repeats "${REPEATS:-10}" --chunk-size 8192 --json "$folder/$(basename "$shape").json" "$@"
}

for shape in ${TEXT_SHAPES-llama-3.1-8b gemma-3-12b}; do
    bench "$shape"
done
for shape in ${VISION_SHAPES-qwen3-vl-8b}; do
    bench "$shape" --image-sizes "${IMAGE_SIZES:-640x480,1280x720,1920x1080,2560x1440}"
done
"$python" scripts/paper_table.py "$folder"/*.json | tee "$folder/table.md"
