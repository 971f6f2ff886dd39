"""Joined layers: the same results from fewer products, the same weights in no more memory."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import triton_references
from cuda_models import build, engine
from torch import nn
from weight_cases import random_weight

from runtime import formats
from runtime import kernels as table
from runtime.engines.base import Chunk
from runtime.engines.llama_structure import FeedForward
from runtime.engines.program.joined import Joined, Part
from runtime.engines.torch.engine import weight_bytes
from runtime.formats.checks import Tensors
from runtime.formats.k_quant import KQuant
from runtime.formats.quantization_config import ModuleEntry
from runtime.formats.row_codebook import RowCodebook
from runtime.formats.scheme import CompressedWeight, GridScheme, Scheme
from runtime.kernels.base import Kernel, Layer
from runtime.kernels.triton import layout
from runtime.kernels.triton.codebooks import KQuantTriton, RowCodebookTriton
from runtime.layers.compressed_linear import CompressedLinear

NAMES = ("q_proj", "k_proj", "v_proj")


class Reordered(Kernel):
    """The layout of the Triton kernels, computed in plain torch."""

    name = "reordered"
    formats = frozenset({"pack-quantized"})
    device = None

    def why_not(self, layer: Layer) -> str | None:
        return None

    def prepare(self, tensors: Tensors, layer: Layer) -> Tensors:
        weight = formats.get(layer.entry.format).unpack(tensors, layer.entry.scheme, layer.shape, layer.dtype)
        assert weight.scale is not None
        packed = triton_references.reorder(weight.values, weight.scale, weight.zero_point, 16, 4)
        return {"words": packed.words, "scale": packed.scale} | ({} if packed.zero is None else {"zero": packed.zero})

    def _weight(self, tensors: Tensors, layer: Layer) -> layout.Weight:
        return layout.Weight(tensors["words"], tensors["scale"], tensors.get("zero"), layer.shape, 16, 4)

    def restore(self, tensors: Tensors, layer: Layer) -> CompressedWeight:
        codes, zero = layout.unpack(tensors["words"], 4, layer.shape[1]), tensors.get("zero")
        turned = None if zero is None else zero.t().contiguous()
        return CompressedWeight(codes, tensors["scale"].t().contiguous(), turned, None, layer.entry.scheme, layer.dtype)

    def run(self, x: torch.Tensor, tensors: Tensors, layer: Layer, bias: torch.Tensor | None) -> torch.Tensor:
        return triton_references.linear(x, self._weight(tensors, layer), bias).to(x.dtype)


@pytest.fixture
def reordered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(table, "KERNELS", (Reordered(), table.REFERENCE))


def compressed(rows: int, columns: int, symmetric: bool = True, bias: bool = False, seed: int = 0) -> CompressedLinear:
    generator = torch.Generator().manual_seed(rows + seed)
    scheme = Scheme(GridScheme(4, "int", symmetric, "group", 16))
    codes = torch.randint(-8, 8, (rows, columns), generator=generator, dtype=torch.int8)
    groups = -(-columns // 16)
    scale = torch.rand(rows, groups, generator=generator) * 0.05 + 0.01
    zero = None if symmetric else torch.randint(-8, 8, (rows, groups), generator=generator, dtype=torch.int8)
    weight = CompressedWeight(codes, scale, zero, None, scheme, torch.float32)
    tensors = formats.get("pack-quantized").pack(weight)
    beside = torch.randn(rows, generator=generator) if bias else None
    entry = ModuleEntry(scheme, "pack-quantized")
    return CompressedLinear.from_tensors(entry, (rows, columns), tensors, beside, torch.float32)


def parent_of(layers: list[nn.Module]) -> nn.Module:
    parent = nn.Module()
    for name, layer in zip(NAMES, layers, strict=True):
        parent.add_module(name, layer)
    return parent


@pytest.mark.parametrize("bias", [(False, False, False), (True, True, True), (False, True, False)])
def test_dense_layers_become_views_of_one(bias: tuple[bool, ...]) -> None:
    torch.manual_seed(0)
    layers: list[Any] = [nn.Linear(24, n, bias=b) for n, b in zip((8, 4, 4), bias, strict=True)]
    parent = parent_of(layers)
    x = torch.randn(3, 24)
    wanted = [layer(x) for layer in layers]
    held = weight_bytes(parent)
    joined = Joined.of(parent, NAMES, "qkv_proj")
    assert len(joined.layers) == 1
    for found, expected, layer in zip(joined(x), wanted, layers, strict=True):
        torch.testing.assert_close(found, expected)
        torch.testing.assert_close(layer(x), expected)
        assert layer.weight.untyped_storage().data_ptr() == joined.layers[0].weight.untyped_storage().data_ptr()
    assert weight_bytes(parent) == held
    assert set(parent.state_dict()) >= {f"{name}.weight" for name in NAMES}
    again = Joined.of(parent, NAMES, "qkv_proj")
    torch.testing.assert_close(again.whole(x)[0], joined.whole(x)[0])


@pytest.mark.usefixtures("reordered")
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("bias", [True, False])
def test_compressed_layers_are_joined_in_their_kernels_layout(symmetric: bool, bias: bool) -> None:
    layers: list[Any] = [compressed(n, 160, symmetric, bias) for n in (40, 24, 24)]
    for layer in layers:
        assert layer.prepare().decode.name == "reordered"
    parent = parent_of(layers)
    x = torch.randn(3, 160)
    wanted = [layer(x) for layer in layers]
    held = weight_bytes(parent)
    joined = Joined.of(parent, NAMES, "qkv_proj")
    (whole,) = joined.layers
    assert isinstance(whole, CompressedLinear)
    assert whole.choice is not None
    assert whole.choice.decode.name == "reordered"
    for name, found, expected in zip(NAMES, joined(x), wanted, strict=True):
        assert torch.equal(found, expected)
        part = getattr(parent, name)
        assert isinstance(part, Part)
        assert torch.equal(part(x), expected)
    assert weight_bytes(parent) == held
    assert dict(parent.named_modules())["qkv_proj"] is whole
    again = Joined.of(parent, NAMES, "qkv_proj")
    assert again.layers == [whole]
    assert torch.equal(again(x)[1], wanted[1])
    wider = whole.to(torch.float64)  # laid out again, as any other compressed layer
    torch.testing.assert_close(wider(x.double())[:, :40], wanted[0].double(), rtol=1e-4, atol=1e-4)


@pytest.mark.usefixtures("reordered")
def test_what_is_left_alone() -> None:
    torch.manual_seed(0)
    mixed: list[list[nn.Module]] = [
        [compressed(32, 64), nn.Linear(64, 16), nn.Linear(64, 16)],
        [compressed(32, 64), compressed(16, 64), compressed(16, 64, symmetric=False)],
        [nn.Linear(64, 16), nn.Linear(64, 16), nn.Linear(64, 16, dtype=torch.bfloat16)],
    ]
    for layers in mixed:
        for layer in layers:
            if isinstance(layer, CompressedLinear):
                layer.prepare()
        parent = parent_of(layers)
        joined = Joined.of(parent, NAMES, "qkv_proj")
        assert joined.layers == layers
        assert [getattr(parent, name) for name in NAMES] == layers
    unprepared: list[nn.Module] = [compressed(n, 64) for n in (32, 16, 16)]
    assert len(Joined.of(parent_of(unprepared), NAMES, "qkv_proj").layers) == 3


@pytest.mark.usefixtures("reordered")
def test_a_layout_that_does_not_concatenate_is_made_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Reordered, "prepare", _interleaved)
    monkeypatch.setattr(Reordered, "restore", _restored)
    layers: list[CompressedLinear] = [compressed(n, 64) for n in (32, 16, 16)]
    for layer in layers:
        layer.prepare()
    wanted = torch.cat([layer.dequantize() for layer in layers])
    (whole,) = Joined.of(parent_of(list(layers)), NAMES, "qkv_proj").layers
    assert isinstance(whole, CompressedLinear)
    assert torch.equal(whole.dequantize(), wanted)


_plain_prepare, _plain_restore = Reordered.prepare, Reordered.restore


def _interleaved(self: Reordered, tensors: Tensors, layer: Layer) -> Tensors:
    """Rows in another order, which depends on how many there are."""
    out = _plain_prepare(self, tensors, layer)
    return {"words": out["words"].flip(1).contiguous(), "scale": out["scale"]}


def _restored(self: Reordered, tensors: Tensors, layer: Layer) -> CompressedWeight:
    return _plain_restore(self, {"words": tensors["words"].flip(1), "scale": tensors["scale"]}, layer)


@pytest.mark.usefixtures("reordered")
def test_an_engine_over_compressed_layers() -> None:
    def packed() -> Any:
        model = build("Qwen2")
        for layer in model.model.layers:
            for parent in (layer.self_attn, layer.mlp):
                for name, child in list(parent.named_children()):
                    if isinstance(child, nn.Linear):
                        new = compressed(
                            child.out_features, child.in_features, bias=child.bias is not None, seed=len(name)
                        )
                        new.prepare()
                        setattr(parent, name, new)
        return model

    ids = list(range(20))
    with torch.inference_mode():
        wanted = packed()(torch.tensor([ids])).logits[0]
    for fuse in (True, False):
        model = packed()
        which = engine(model, fuse=fuse)
        assert len(which.parts.blocks[0].qkv.layers) == (1 if fuse else 3)
        mlp = which.parts.blocks[0].mlp
        assert isinstance(mlp, FeedForward)
        assert len(mlp.gate_up.layers) == (1 if fuse else 2)
        pool = which.new_pages(2)
        which.step(pool, [Chunk(ids[:17], 0, [1, 0])])
        torch.testing.assert_close(
            which.step(pool, [Chunk(ids[17:18], 17, [1, 0])])[0], wanted[17], rtol=1e-3, atol=1e-3
        )
        with torch.inference_mode():  # transformers still can
            torch.testing.assert_close(model(torch.tensor([ids])).logits[0], wanted, rtol=1e-3, atol=1e-3)
        assert len([kernel for kernel in which.explain().values() if kernel == "reordered"]) == (8 if fuse else 14)


@pytest.mark.parametrize("name", ["W4A16Triton", "Sparse24Triton"])
@pytest.mark.parametrize("symmetric", [True, False])
def test_layouts_of_the_triton_kernels_are_joined(name: str, symmetric: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Laid out and read back only: this needs no GPU."""
    pytest.importorskip("triton")
    kernels = pytest.importorskip("runtime.kernels.triton.linear")
    monkeypatch.setattr(table, "KERNELS", (getattr(kernels, name)("cpu"), table.REFERENCE))
    generator = torch.Generator().manual_seed(0)
    sparse = name == "Sparse24Triton"
    scheme = Scheme(GridScheme(4, "int", symmetric, "group", 64), sparsity="2:4" if sparse else None)
    storage = "sparse24" if sparse else "pack-quantized"
    layers: list[nn.Module] = []
    for rows in (64, 32, 32):
        codes = torch.randint(-8, 8, (rows, 256), generator=generator, dtype=torch.int8)
        zero = None if symmetric else torch.randint(-8, 8, (rows, 4), generator=generator, dtype=torch.int8)
        mask = None
        if sparse:
            mask = torch.tensor([True, False, True, False]).repeat(rows, 64)
            nothing = 0 if zero is None else zero.repeat_interleave(64, 1)
            codes = torch.where(mask, codes, torch.as_tensor(nothing, dtype=torch.int8))
        scale = (torch.rand(rows, 4, generator=generator) + 0.1).to(torch.bfloat16)
        weight = CompressedWeight(codes, scale, zero, mask, scheme, torch.bfloat16)
        tensors = formats.get(storage).pack(weight)
        layer = CompressedLinear.from_tensors(ModuleEntry(scheme, storage), (rows, 256), tensors, None, torch.bfloat16)
        assert layer.prepare().decode.name == getattr(kernels, name).name
        layers.append(layer)
    wanted = torch.cat([layer.dequantize() for layer in layers])  # type: ignore[operator]
    (whole,) = Joined.of(parent_of(layers), NAMES, "qkv_proj").layers
    assert isinstance(whole, CompressedLinear)
    assert torch.equal(whole.dequantize(), wanted)


@pytest.mark.parametrize(
    "form", [RowCodebook(3, 64, 0.02), KQuant("Q4_K"), KQuant("IQ4_XS")], ids=lambda form: form.describe()
)
def test_row_codebooks_and_k_quants_are_joined(form: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each row keeps its own levels, outliers and minima."""
    pytest.importorskip("triton")
    kernels = (RowCodebookTriton("cpu"), KQuantTriton("cpu"))
    monkeypatch.setattr(table, "KERNELS", (*kernels, table.REFERENCE))
    scheme = Scheme(form)
    layers: list[nn.Module] = []
    for seed, rows in enumerate((64, 32, 32)):
        tensors = formats.get(form.name).pack(random_weight(scheme, (rows, 256), seed=seed))
        layer = CompressedLinear.from_tensors(
            ModuleEntry(scheme, form.name), (rows, 256), tensors, None, torch.bfloat16
        )
        assert layer.prepare().decode.name in {kernel.name for kernel in kernels}
        layers.append(layer)
    wanted = torch.cat([layer.dequantize() for layer in layers])  # type: ignore[operator]
    (whole,) = Joined.of(parent_of(layers), NAMES, "qkv_proj").layers
    assert isinstance(whole, CompressedLinear)
    assert torch.equal(whole.dequantize(), wanted)
