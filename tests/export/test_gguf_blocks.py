"""GGUF's blocks hold an artifact's codes and scales bit for bit; what they cannot hold is refused by name or rounded when asked."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from gguf_models import exactly, export_gguf, save_compressed, save_model
from weight_cases import int_scheme, random_weight

from export.gguf import grids
from runtime.errors import CompressError, RequestError
from runtime.formats.scheme import CompressedWeight

gguf = pytest.importorskip("gguf")
Make = Callable[..., Path]


_GRIDS = {
    **{f"int{bits}": (int_scheme(bits, group=64), "Q4_0" if bits < 5 else "Q5_0" if bits == 5 else "Q8_0") for bits in range(2, 9)},
    **{f"int{bits} asymmetric": (int_scheme(bits, False, 32), "Q4_0" if bits < 4 else "Q5_0" if bits == 4 else "Q8_0")
       for bits in range(2, 8)},
    "int4 channel": (int_scheme(4), "Q4_0"),
    "int4 tensor": (int_scheme(4, group="tensor"), "Q4_0"),
    "int4 asymmetric tensor": (int_scheme(4, False, "tensor"), "Q5_0"),
    "int4 with a short last group": (int_scheme(4, group=128), "Q4_0"),
    "int8 wider than a row": (int_scheme(8, group=200), "Q8_0"),
    "2:4 int4": (int_scheme(4, group=64, sparsity="2:4"), "Q4_0"),
}  # fmt: skip


@pytest.mark.parametrize("name", _GRIDS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_blocks_hold_codes_and_scales_as_they_are(name: str, dtype: torch.dtype) -> None:
    scheme, kind = _GRIDS[name]
    weight = random_weight(scheme, (24, 192), dtype)
    assert scheme.weights is not None
    assert grids.aligned(scheme.weights, 192)
    assert grids.block_type(scheme.weights) == kind
    packed = grids.pack(weight, kind)
    found = gguf.quants.dequantize(packed.numpy(), gguf.GGMLQuantizationType[kind])
    assert torch.equal(torch.from_numpy(found), exactly(weight))


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q5_0", "Q8_0"])
def test_blocks_are_laid_out_as_the_gguf_package_lays_them_out(kind: str) -> None:
    """Weights that the package's own rounding leaves as they are become the package's own bytes."""
    low, high = {"Q4_0": (-8, 7), "Q4_1": (-8, 7), "Q5_0": (-16, 15), "Q8_0": (-127, 127)}[kind]
    bits = {"Q4_0": 4, "Q4_1": 4, "Q5_0": 5, "Q8_0": 8}[kind]
    scheme = int_scheme(bits, kind != "Q4_1", 32)
    codes = torch.randint(low, high + 1, (16, 96), generator=torch.Generator().manual_seed(3), dtype=torch.int8)
    codes[:, ::32], codes[:, 1::32] = low, high  # both ends in every block, so that the package finds the same scale
    scale = torch.full((16, 3), 0.25, dtype=torch.bfloat16)
    zero = torch.full((16, 3), -3, dtype=torch.int8) if kind == "Q4_1" else None
    weight = CompressedWeight(codes, scale, zero, None, scheme, torch.bfloat16)
    theirs = gguf.quants.quantize(exactly(weight).numpy(), gguf.GGMLQuantizationType[kind])
    assert grids.pack(weight, kind).numpy().tobytes() == theirs.tobytes()


def test_scales_are_checked_one_by_one() -> None:
    good = torch.tensor([1.0, 2.0**-17 * 1.9921875, 65280.0], dtype=torch.bfloat16)
    assert grids.scale_fits(good)
    for bad in (1e-7, 1e5, 2.0**-18 * 1.9921875):
        assert not grids.scale_fits(torch.cat([good, torch.tensor([bad], dtype=torch.bfloat16)]))
    assert not grids.scale_fits(torch.tensor([0.1], dtype=torch.float32))


def test_minima_of_q4_1_round_by_less_than_one_percent_of_a_step() -> None:
    weight = random_weight(int_scheme(4, False, 32), (64, 256))
    assert weight.scale is not None
    assert weight.zero_point is not None
    assert not grids.scale_fits(grids.minimum(weight.scale, weight.zero_point))
    found = gguf.quants.dequantize(grids.pack(weight, "Q4_1").numpy(), gguf.GGMLQuantizationType.Q4_1)
    step = weight.scheme.weights.spread(weight.scale.float(), 256)
    off = ((torch.from_numpy(found) - exactly(weight)) / step).abs()
    assert 0 < float(off.max()) < 15 * 2.0**-11


def test_groups_that_cut_blocks_are_refused_or_rounded(made: Make, tmp_path: Path) -> None:
    with pytest.raises(RequestError, match=r"model\.layers\.0\..*\b48\b.*--requantize"):
        export_gguf(made("w4_g48"), tmp_path / "out")
    assert not (tmp_path / "out").exists()
    result = export_gguf(made("w4_g48"), tmp_path / "out", requantize=True, verify=False)
    assert len(result.losses) == 14
    assert 0.01 < max(result.losses.values()) < 0.2
    assert any("rounded anew to Q4_0" in c.what and not c.exact for c in result.conversions)


def _with_scale(path: Path, value: float, dtype: torch.dtype) -> Path:
    save_compressed(path, int_scheme(4, group=32), dtype=dtype)
    from safetensors.torch import load_file, save_file

    tensors = load_file(path / "model.safetensors")
    for name in tensors:
        if name.endswith("weight_scale"):
            tensors[name][3, 1] = value
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    return path


def test_scales_that_fp16_does_not_hold_are_refused_by_name(tmp_path: Path) -> None:
    tiny = _with_scale(tmp_path / "tiny", 1e-7, torch.bfloat16)
    with pytest.raises(RequestError, match=r"layers\.0\.self_attn\.q_proj.*\bfp16\b"):
        export_gguf(tiny, tmp_path / "out")
    result = export_gguf(tiny, tmp_path / "out", requantize=True, verify=False)
    assert set(result.losses) == {f"model.layers.{i}.self_attn.q_proj" for i in range(2)}
    assert max(result.losses.values()) < 1e-3
    huge = _with_scale(tmp_path / "huge", 1e6, torch.bfloat16)
    with pytest.raises(RequestError, match=r"\b999424\b.*\bfp16\b"):
        export_gguf(huge, tmp_path / "out2", requantize=True)


def test_float32_scales_are_rounded_only_when_asked(tmp_path: Path) -> None:
    path = save_compressed(tmp_path / "model", int_scheme(8), dtype=torch.float32)
    with pytest.raises(RequestError, match=r"\bfp16\b.*--requantize"):
        export_gguf(path, tmp_path / "out")
    result = export_gguf(path, tmp_path / "out", requantize=True)
    assert len(result.losses) == 2
    assert max(result.losses.values()) < 5e-4


def test_asymmetric_int8_is_kept_where_codes_are_near_their_zero_point(tmp_path: Path) -> None:
    path = save_compressed(tmp_path / "model", int_scheme(8, False, 32))
    with pytest.raises(RequestError, match=r"\bQ8_0\b.*--requantize"):
        export_gguf(path, tmp_path / "out")
    result = export_gguf(path, tmp_path / "out", requantize=True)
    assert 0 < max(result.losses.values()) < 0.01


def test_values_beyond_f16_are_refused(tmp_path: Path) -> None:
    model = save_model("llama", tmp_path / "model", save=False)
    with torch.no_grad():
        model.model.layers[0].mlp.up_proj.weight[0, 0] = 1e6
    model.save_pretrained(tmp_path / "model")
    with pytest.raises(RequestError, match=r"up_proj\.weight.*\bF16\b.*dense="):
        export_gguf(tmp_path / "model", tmp_path / "out", dense="f16")
    assert not (tmp_path / "out").exists()


def test_a_damaged_file_is_found(made: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from export.gguf import writer

    right = writer.encode
    monkeypatch.setattr(writer, "encode", lambda source, tensor: right(source, replace(tensor, heads=None)))
    with pytest.raises(CompressError, match=r"attn_q\.weight"):
        export_gguf(made("w4_g128"), tmp_path / "out")
    assert not (tmp_path / "out").exists()
