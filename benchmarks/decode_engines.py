"""Rows of `decode_cpu.py`: the shapes, the engines, and what each of them loads."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

OURS = ("ours", "ours-fast", "ours-2:4", "ours-2:4-fast")
SHAPES = {
    "1.1b": {"layers": 22, "hidden": 2048, "intermediate": 5632, "heads": 32, "kv-heads": 4, "vocabulary": 32000},
    "3b": {"layers": 28, "hidden": 3072, "intermediate": 8192, "heads": 24, "kv-heads": 8, "vocabulary": 32000},
    "tiny": {"layers": 4, "hidden": 256, "intermediate": 512, "heads": 8, "kv-heads": 2, "vocabulary": 2048},
}
PRUNE = {"prune": {"method": "magnitude", "pattern": "2:4", "ignore": []}}
QUANTIZE = {"quantize": {"method": "rtn", "scheme": "W4A16", "group_size": 128, "ignore": []}}
ARTIFACTS = {"w4": [QUANTIZE], "w4-2:4": [PRUNE, QUANTIZE]}


@dataclass(frozen=True)
class Engine:
    """One row: the script that runs it, what it reads, its part of the request.

    Attributes:
        script: `benchmarks/peers/decode_SCRIPT.py`.
        reads: what it loads: "checkpoint", an artifact of `ARTIFACTS`, or "own" (its `prepare` makes it).
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
PRODUCTS = ("bandwidth", *OURS, "llama.cpp", "onnxruntime", "openvino", "torch-int4")
ROWS, COLUMNS, GROUP = 11008, 4096, 128
