"""What tensors hold."""

from __future__ import annotations

import pytest
import torch

from compress.core.tensors import finite


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_one_bad_number_is_seen(dtype: torch.dtype, bad: float) -> None:
    value = torch.randn(70, 33).to(dtype)
    value[3, 5] = torch.finfo(dtype).max
    assert finite(value)
    assert finite(value[:0])
    for place in (0, 1234, value.numel() - 1):
        spoiled = value.clone()
        spoiled.view(-1)[place] = bad
        assert not finite(spoiled)
        assert not finite(spoiled.T)
