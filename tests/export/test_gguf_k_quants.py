"""K-quants in GGUF: the artifact's blocks are the file's, other targets refuse them by name, and llama.cpp computes the same."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path

import numpy
import pytest
import torch
from gguf_models import export_gguf, read_gguf, unrotate

import export
from export import targets
from export.source import Source
from runtime.errors import RequestError
from runtime.formats.k_quant import KINDS, KQuant

gguf = pytest.importorskip("gguf")
needs_llama_cpp = pytest.mark.skipif(
    importlib.util.find_spec("llama_cpp") is None, reason="llama-cpp-python is not installed"
)
Make = Callable[..., Path]
NAMES = {
    "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj", "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj",
}  # fmt: skip


@pytest.mark.parametrize("kind", ["q4_k", "k_mixture"])
def test_the_files_blocks_are_the_artifacts(made: Make, tmp_path: Path, kind: str) -> None:
    path = made(kind, hidden_size=256)
    result, source = export_gguf(path, tmp_path / "out", verify=kind == "q4_k"), Source(path)
    assert result.losses == {}
    copied = [c for c in result.conversions if "blocks are copied as they are" in c.what]
    assert all(c.exact and c.bytes == 0 for c in copied)
    assert sum(len(c.modules) for c in copied) == 14
    stored = {tensor.name: tensor for tensor in gguf.GGUFReader(result.path / "model.gguf").tensors}
    _, values = read_gguf(result.path)
    types = set()
    for block in range(2):
        for short, long in NAMES.items():
            name, module = f"blk.{block}.{short}.weight", f"model.layers.{block}.{long}"
            form = source.entries[module].scheme.weights
            assert isinstance(form, KQuant)
            assert stored[name].tensor_type.name == form.kind
            types.add(form.kind)
            found = torch.from_numpy(numpy.array(stored[name].data))
            dense, heads = values[name][1], {"attn_q": 4, "attn_k": 2}.get(short)
            if heads is not None:
                found, dense = unrotate(found, heads), unrotate(dense, heads)
            assert torch.equal(found, source.artifact.checkpoint.get(f"{module}.weight_blocks"))
            weight = source.weight(module)
            assert torch.equal(dense, form.dequantize(weight.values, weight.parameters, torch.float32))
    assert types == ({"Q4_K"} if kind == "q4_k" else set(KINDS))


def test_other_targets_refuse_them_by_name(made: Make, tmp_path: Path) -> None:
    path = made("q4_k", hidden_size=256)
    for name in targets.names():
        if name == "gguf":
            continue
        with pytest.raises(RequestError, match=r"model\.layers\.0\.\S+ are stored as representation k_quant \(Q4_K\)"):
            export.export(path, name, tmp_path / name, quiet=True)


@needs_llama_cpp
@pytest.mark.parametrize("kind", ["q4_k", "k_mixture"])
def test_llama_cpp_says_the_same_tokens(made: Make, tmp_path: Path, kind: str) -> None:
    metrics = export_gguf(made(kind, hidden_size=256), tmp_path / "out").verification.metrics
    assert metrics["float32_kl"] < 1e-6
    assert metrics["float32_same_tokens"] == metrics["tokens"]
