"""Inputs that compressed layers read as they are, and the prefix that static grids are good behind."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

from runtime import formats
from runtime.errors import RequestError
from runtime.formats.activation_scheme import ActivationScheme
from runtime.formats.grid import GridScheme
from runtime.formats.quantization_config import ModuleEntry
from runtime.formats.scheme import Scheme
from runtime.layers.compressed_linear import CompressedLinear
from runtime.layers.rounding import round_weight
from runtime.layers.unrounded import input_prefix, unrounded

STATIC = ActivationScheme(8, dynamic=False, strategy="tensor", prefix=(3, 5))


def _layer() -> CompressedLinear:
    torch.manual_seed(0)
    scheme = Scheme(GridScheme(8, "int", True, "channel"), STATIC)
    storage = formats.choose(scheme, (16, 32))
    tensors = storage.pack(round_weight(torch.randn(16, 32), scheme, torch.float32), input_scale=torch.tensor([0.05]))
    layer = CompressedLinear.from_tensors(
        ModuleEntry(scheme, storage.name), (16, 32), tensors, torch.randn(16), torch.float32
    )
    layer.prepare("reference")
    return layer


def test_a_prefix_is_written_and_read_and_is_of_no_other_kind_of_grid() -> None:
    assert ActivationScheme.from_arguments(STATIC.to_config()) == STATIC
    assert STATIC.own, "compressed-tensors has no word for it"
    assert "prefix" not in replace(STATIC, prefix=()).to_config()
    assert not replace(STATIC, prefix=()).own
    assert STATIC.why_not(32) is None
    assert "static" in str(ActivationScheme(8, prefix=(3,)).why_not(32))
    for wrong in (3, "ab", [-1], [True], [1.5]):
        with pytest.raises(ValueError, match="prefix"):
            ActivationScheme.from_arguments(STATIC.to_config() | {"prefix": wrong})


def test_all_tokens_or_those_that_begin_rows_are_not_rounded() -> None:
    layer, x = _layer(), torch.randn(2, 6, 32) * 20
    model = nn.Sequential(layer)
    assert input_prefix(model) == (3, 5)
    rounded, exact = model(x), nn.functional.linear(x, layer.dequantize(), layer.bias)
    assert not torch.allclose(rounded, exact, atol=0.1)
    with unrounded(model):
        torch.testing.assert_close(model(x), exact)
        torch.testing.assert_close(model(x[0]), exact[0], atol=1e-4, rtol=1e-4)
    with unrounded(model, 2):
        expected = torch.cat([exact[:, :2], rounded[:, 2:]], 1)
        torch.testing.assert_close(model(x), expected, atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(model(x[:, :1]), exact[:, :1], atol=1e-4, rtol=1e-4)
        with pytest.raises(RequestError, match="out of their rows"):
            model(x[0])
    assert torch.equal(model(x), rounded)
