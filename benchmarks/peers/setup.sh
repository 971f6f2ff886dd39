#!/usr/bin/env bash
# Makes one virtual environment per peer under DIR: DIR/llmcompressor, DIR/gptqmodel and DIR/autoround.
#   benchmarks/peers/setup.sh DIR [llmcompressor|gptqmodel|autoround ...]
# PYTHON chooses the interpreter (3.11 is what the published numbers used). torch goes in first, on its own, and a
# constraint keeps it there, so that a peer cannot swap the CPU build for one that drags in gigabytes of CUDA libraries.
# Where pip would pick the CUDA build, give its CPU index: TORCH_PIP_ARGS="--index-url https://download.pytorch.org/whl/cpu".
set -euo pipefail

if [ $# -lt 1 ]; then
    sed -n '2,6p' "$0" >&2
    exit 2
fi
root=$1
shift
peers=("$@")
[ ${#peers[@]} -gt 0 ] || peers=(llmcompressor gptqmodel autoround)
python=${PYTHON:-python3.11}
torch=2.13.0

for peer in "${peers[@]}"; do
    case $peer in
    llmcompressor) package=llmcompressor==0.14.0.1 ;;
    gptqmodel) package=gptqmodel==7.6.0 ;;
    autoround) package=auto-round==0.16.1 ;;
    *)
        echo "unknown peer '$peer'; known: llmcompressor, gptqmodel, autoround" >&2
        exit 2
        ;;
    esac
    env=$root/$peer
    [ -x "$env/bin/python" ] || "$python" -m venv "$env"
    # shellcheck disable=SC2086
    "$env/bin/pip" install --quiet ${TORCH_PIP_ARGS:-} "torch==$torch"
    installed=$("$env/bin/python" -c 'import importlib.metadata as m; print(m.version("torch"))')
    printf 'torch==%s\n' "$installed" >"$env/constraints.txt"
    "$env/bin/pip" install --quiet --constraint "$env/constraints.txt" "$package"
    if "$env/bin/pip" list 2>/dev/null | grep -i '^nvidia-c'; then
        echo "$peer: CUDA packages came in; remove $env and set TORCH_PIP_ARGS" >&2
        exit 1
    fi
    "$env/bin/pip" list 2>/dev/null | grep -i -E '^(torch|transformers|llmcompressor|gptqmodel|auto-round|compressed-tensors|safetensors) ' || true
    du -sh "$env"
done
