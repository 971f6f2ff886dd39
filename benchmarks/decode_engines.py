"""Rows of `decode_cpu.py` and `decode_depths.py`: the shapes, the engines, and what each of them loads."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

OURS = (
    "ours", "ours-fast", "ours-2:4", "ours-2:4-fast", "ours-kv4", "ours-fast-kv4",
    "ours-w3", "ours-w3-fast", "ours-w2", "ours-w2-fast",
)  # fmt: skip
SHAPES = {
    "1.1b": {"layers": 22, "hidden": 2048, "intermediate": 5632, "heads": 32, "kv-heads": 4, "vocabulary": 32000},
    "3b": {"layers": 28, "hidden": 3072, "intermediate": 8192, "heads": 24, "kv-heads": 8, "vocabulary": 32000},
    "moe": {
        "layers": 12, "hidden": 2048, "intermediate": 768, "heads": 32, "kv-heads": 4, "vocabulary": 32000,
        "experts": 32, "chosen": 4,
    },
    "tiny": {"layers": 4, "hidden": 256, "intermediate": 512, "heads": 8, "kv-heads": 2, "vocabulary": 2048},
}  # fmt: skip
PRUNE = {"prune": {"method": "magnitude", "pattern": "2:4", "ignore": []}}
QUANTIZE = {"quantize": {"method": "rtn", "scheme": "W4A16", "group_size": 128, "ignore": []}}
DENSE_HEAD = {"quantize": {**QUANTIZE["quantize"], "ignore": ["lm_head"]}}
W3, W2 = ({"quantize": {**QUANTIZE["quantize"], "scheme": scheme}} for scheme in ("W3A16", "W2A16"))
ARTIFACTS = {"w4": [QUANTIZE], "w3": [W3], "w2": [W2], "w4-2:4": [PRUNE, QUANTIZE], "w4-dense-head": [DENSE_HEAD]}


@dataclass(frozen=True)
class Engine:
    """One row: the script that runs it, what it reads, its part of the request.

    Attributes:
        script: `benchmarks/peers/decode_SCRIPT.py`.
        reads: what it loads: "checkpoint", an artifact of `ARTIFACTS`, or the script whose `prepare` makes it ("own": its own).
        grid: the dense checkpoint that `--check` compares its logits with.
    """

    label: str
    script: str
    reads: str
    options: dict[str, Any] = field(default_factory=dict)
    grid: str = "group"


ENGINES = {
    "ours": Engine("ours, exact", "ours", "w4", {"kernels": "auto", "sparse": False}),
    "ours-fast": Engine("ours, fast", "ours", "w4", {"kernels": "fast", "sparse": False}),
    "ours-2:4": Engine("ours 2:4 + int4, exact", "ours", "w4-2:4", {"kernels": "auto", "sparse": True}),
    "ours-2:4-fast": Engine("ours 2:4 + int4, fast", "ours", "w4-2:4", {"kernels": "fast", "sparse": True}),
    "llama.cpp": Engine("llama.cpp Q4_0", "llama_cpp", "own", grid="q4_0"),
    "onnxruntime": Engine("ONNX Runtime MatMulNBits", "onnxruntime", "own"),
    "openvino": Engine("OpenVINO u4", "openvino", "own"),
    "torch-int4": Engine("torch int4, eager", "torch_int4", "own", {"compile": False}),
    "torch-int4-compiled": Engine("torch int4, compiled", "torch_int4", "own", {"compile": True}),
    "transformers": Engine("transformers bf16, eager", "transformers", "checkpoint", {"dtype": "bfloat16"}, "dense"),
    "transformers-compiled": Engine(
        "transformers bf16, compiled", "transformers", "checkpoint", {"dtype": "bfloat16", "compile": True}, "dense"
    ),
    "transformers-fp32": Engine(
        "transformers fp32, eager", "transformers", "checkpoint", {"dtype": "float32"}, "dense"
    ),
}
# `decode_depths.py` goes through these: the engines of other projects as they are meant to be used, not a graph written for them here.
INT4_CACHE = {"kv_cache": {"keys": "int4", "values": "int4"}}
DEEP_ENGINES = {
    "ours": ENGINES["ours"],
    "ours-fast": ENGINES["ours-fast"],
    "ours-kv4": Engine("ours, exact, int4 cache", "ours", "w4", {"kernels": "auto", **INT4_CACHE}),
    "ours-fast-kv4": Engine("ours, fast, int4 cache", "ours", "w4", {"kernels": "fast", **INT4_CACHE}),
    "ours-w3": Engine("ours, exact, 3 bits", "ours", "w3", {"kernels": "auto"}),
    "ours-w3-fast": Engine("ours, fast, 3 bits", "ours", "w3", {"kernels": "fast"}),
    "ours-w2": Engine("ours, exact, 2 bits", "ours", "w2", {"kernels": "auto"}),
    "ours-w2-fast": Engine("ours, fast, 2 bits", "ours", "w2", {"kernels": "fast"}),
    "llama.cpp": ENGINES["llama.cpp"],
    "ik_llama.cpp": Engine("ik_llama.cpp Q4_0, repacked", "ik_llama", "llama_cpp", grid="q4_0"),
    "mistral.rs": Engine("mistral.rs Q4K", "mistralrs", "own", {"isq": "Q4K"}),
    "onnxruntime-genai": Engine("ONNX Runtime GenAI int4", "onnxruntime_genai", "own"),
    "onnxruntime": Engine("ONNX Runtime, own graph", "onnxruntime", "own"),
    "openvino-genai": Engine("OpenVINO GenAI u4", "openvino_genai", "own"),
    "vllm": Engine("vLLM CPU W4A16, bf16 head", "vllm", "w4-dense-head", {"eager": True}),
}
# Ours with ours: what a change of the same model brings.
PAIRS = {
    "ours-kv4": "ours", "ours-fast-kv4": "ours-fast",
    "ours-w3": "ours", "ours-w3-fast": "ours-fast", "ours-w2": "ours", "ours-w2-fast": "ours-fast",
}  # fmt: skip
HOMES = {
    "ik_llama": "ik",
    "mistralrs": "mistralrs",
    "vllm": "vllm",
}  # scripts whose packages have an environment of their own
PRODUCTS = ("bandwidth", *OURS, "llama.cpp", "onnxruntime", "openvino", "torch-int4")
ROWS, COLUMNS, GROUP = 11008, 4096, 128
