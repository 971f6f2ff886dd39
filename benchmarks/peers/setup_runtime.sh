#!/usr/bin/env bash
# Makes the environment of the engines that `benchmarks/decode_cpu.py` measures beside ours: DIR, a virtual environment.
#   benchmarks/peers/setup_runtime.sh DIR
# PYTHON chooses the interpreter (3.11 is what the published numbers used). torch goes in first, on its own; where pip would
# pick the CUDA build, give its CPU index: TORCH_PIP_ARGS="--index-url https://download.pytorch.org/whl/cpu".
# llama.cpp is compiled here for this very CPU (10-20 minutes; a prebuilt wheel would run without its best instructions).
set -euo pipefail

if [ $# -ne 1 ]; then
    sed -n '2,6p' "$0" >&2
    exit 2
fi
env=$1
python=${PYTHON:-python3.11}

[ -x "$env/bin/python" ] || "$python" -m venv "$env"
# shellcheck disable=SC2086
"$env/bin/pip" install --quiet ${TORCH_PIP_ARGS:-} torch==2.13.0
printf 'torch==%s\n' "$("$env/bin/python" -c 'import importlib.metadata as m; print(m.version("torch"))')" >"$env/constraints.txt"
"$env/bin/pip" install --quiet --constraint "$env/constraints.txt" numpy transformers==5.23.0 safetensors psutil \
    onnxruntime==1.31.1 onnx openvino==2026.4.1 gguf==0.19.0
CMAKE_ARGS="-DGGML_NATIVE=ON" "$env/bin/pip" install --quiet --constraint "$env/constraints.txt" \
    --no-binary llama-cpp-python llama-cpp-python==0.3.36
"$env/bin/pip" list 2>/dev/null | grep -i -E '^(torch|transformers|onnx|onnxruntime|openvino|gguf|llama_cpp_python|numpy) ' || true
"$env/bin/python" -c 'import llama_cpp; print(llama_cpp.llama_print_system_info().decode())'
du -sh "$env"
