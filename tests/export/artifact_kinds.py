"""Artifacts of every kind that targets meet: one small Llama, compressed in each of the ways of the issue's matrix."""

from __future__ import annotations

from typing import Any

# Hidden 128 and 256, so that groups of 128 exist; three layers of different names in each block are enough.
SIZES: dict[str, Any] = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2}

STAGES: dict[str, list[dict[str, Any]]] = {
    "dense": [],
    "w4_g128": [{"quantize": {"method": "rtn", "scheme": "W4A16", "group_size": 128}}],
    "w4_g32_asymmetric": [{"quantize": {"method": "rtn", "scheme": "W4A16_ASYM", "group_size": 32}}],
    "w8a8": [{"quantize": {"method": "rtn", "scheme": "W8A8-INT8"}}],
    "llm_int8": [{"quantize": {"method": "rtn", "scheme": "LLM.int8"}}],
    "fp8": [{"quantize": {"method": "rtn", "scheme": "FP8_DYNAMIC"}}],
    "sparse_w4": [
        {"prune": {"method": "magnitude", "pattern": "2:4"}},
        {"quantize": {"method": "rtn", "scheme": "W4A16", "group_size": 128}},
    ],
    # what TensorRT can say of them: positive scales
    "w4_g128_positive": [{"quantize": {"method": "rtn", "scheme": "W4A16", "group_size": 128, "scales": "positive"}}],
    "w8a8_positive": [{"quantize": {"method": "rtn", "scheme": "W8A8-INT8", "scales": "positive"}}],
    "sparse_w4_positive": [
        {"prune": {"method": "magnitude", "pattern": "2:4"}},
        {"quantize": {"method": "rtn", "scheme": "W4A16", "group_size": 128, "scales": "positive"}},
    ],
    # beyond the matrix
    "w4_channel": [{"quantize": {"method": "rtn", "scheme": "W4A16", "group_size": "channel"}}],
    "w3_g64": [{"quantize": {"method": "rtn", "scheme": "W3A16", "group_size": 64}}],
    "w8_channel": [{"quantize": {"method": "rtn", "scheme": "W8A16"}}],
    "w4_g48": [{"quantize": {"method": "rtn", "scheme": "W4A16", "group_size": 48}}],
    "w8a8_static": [{"quantize": {"method": "rtn", "scheme": "W8A8-INT8", "activation_mode": "static"}}],
    "fp8_static": [{"quantize": {"method": "rtn", "scheme": "FP8"}}],
    "w4a8": [{"quantize": {"method": "rtn", "scheme": "W4A8"}}],
    "w4afp8": [{"quantize": {"method": "rtn", "scheme": "W4AFP8"}}],
    "nvfp4_weights": [{"quantize": {"method": "rtn", "scheme": "NVFP4A16"}}],
    "mxfp4_weights": [{"quantize": {"method": "rtn", "scheme": "MXFP4A16"}}],
    "nvfp4": [{"quantize": {"method": "rtn", "scheme": "NVFP4"}}],
    "mxfp4": [{"quantize": {"method": "rtn", "scheme": "MXFP4"}}],
    "mxfp8": [{"quantize": {"method": "rtn", "scheme": "MXFP8"}}],
    "fp8_block": [{"quantize": {"method": "rtn", "scheme": "FP8_BLOCK"}}],
    "turned_w4": [{"quantize": {"method": "rtn", "scheme": "W4A16", "group_size": 32, "input_transform": "hadamard"}}],
    "turned_w4_groups": [
        {
            "quantize": {
                "method": "rtn",
                "scheme": "W4A16",
                "group_size": 64,
                "scales": "positive",
                "input_transform": "hadamard_groups",
            }
        }
    ],
    "turned_w8a8": [{"quantize": {"method": "rtn", "scheme": "W8A8-INT8", "input_transform": "hadamard"}}],
    "ordered_w4": [
        {"quantize": {"method": "rtn", "scheme": "W4A16", "group_size": 32, "input_transform": "outliers_last"}}
    ],
    "atom": [{"quantize": {"method": "rtn", "scheme": "Atom", "group_size": 32, "int8_channels": 32}}],
    "atom_g64_positive": [
        {"quantize": {"method": "rtn", "scheme": "Atom", "group_size": 64, "int8_channels": 64, "scales": "positive"}}
    ],
    "row_codebook": [
        {"quantize": {"method": "rtn", "scheme": {"representation": "row_codebook", "bits": 3, "outliers": 0.01}}}
    ],
    "ternary": [{"quantize": {"method": "rtn", "scheme": "TERNARY"}}],
    "bitmap": [{"prune": {"method": "magnitude", "pattern": "unstructured", "sparsity": 0.6}}],
}
MATRIX = ("dense", "w4_g128", "w4_g32_asymmetric", "w8a8", "fp8", "sparse_w4")
# Rows of whole blocks of 256: with hidden_size=256.
K_QUANTS: dict[str, list[dict[str, Any]]] = {
    "q4_k": [{"quantize": {"method": "gptq", "scheme": "Q4_K"}}],
    "k_mixture": [
        {"quantize": {"method": "rtn", "scheme": "Q6_K", "targets": ["*down_proj"]}},
        {"quantize": {"method": "rtn", "scheme": "IQ4_XS", "targets": ["*q_proj"]}},
        {"quantize": {"method": "rtn", "scheme": "IQ4_NL", "targets": ["*k_proj"]}},
        {"quantize": {"method": "rtn", "scheme": "Q5_K", "targets": ["*v_proj"]}},
        {"quantize": {"method": "rtn", "scheme": "Q3_K", "targets": ["*gate_proj"]}},
        {"quantize": {"method": "rtn", "scheme": "Q2_K", "targets": ["*up_proj"]}},
        {"quantize": {"method": "rtn", "scheme": "Q4_K", "targets": ["*o_proj"]}},
    ],
}
# What no other engine has a word for.
OURS = ("llm_int8", "row_codebook", "ternary", "atom")
# What only the layout of compressed-tensors has words for.
BLOCK_FLOATS = ("nvfp4_weights", "mxfp4_weights", "nvfp4", "mxfp4", "mxfp8", "fp8_block")
