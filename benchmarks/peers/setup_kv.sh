#!/usr/bin/env bash
# Makes the environment of the KV-cache compressor that ours is measured beside, NVIDIA's kvpress: DIR/kvpress, a virtual
# environment that `kv_press.py` runs in.
#   benchmarks/peers/setup_kv.sh DIR
# PYTHON chooses the interpreter (3.11 is what the published numbers used). torch goes in first, on its own; where pip would
# pick the CUDA build, give its CPU index: TORCH_PIP_ARGS="--index-url https://download.pytorch.org/whl/cpu".
# transformers 5.2.0 is the release that kvpress 0.5.5 was made with; flash-attn is optional to it and stays out.
set -euo pipefail

if [ $# -ne 1 ]; then
    sed -n '2,7p' "$0" >&2
    exit 2
fi
env=$1/kvpress
python=${PYTHON:-python3.11}

mkdir -p "$1"
[ -x "$env/bin/python" ] || "$python" -m venv "$env"
# shellcheck disable=SC2086
"$env/bin/pip" install --quiet ${TORCH_PIP_ARGS:-} torch==2.13.0
printf 'torch==%s\n' "$("$env/bin/python" -c 'import importlib.metadata as m; print(m.version("torch"))')" >"$env/constraints.txt"
"$env/bin/pip" install --quiet --constraint "$env/constraints.txt" kvpress==0.5.5 transformers==5.2.0
"$env/bin/pip" list 2>/dev/null | grep -i -E '^(torch|transformers|kvpress|accelerate|datasets|numpy) ' || true
"$env/bin/python" -c 'import kvpress; print(len(kvpress.__all__), "names in kvpress")'
du -sh "$env"
