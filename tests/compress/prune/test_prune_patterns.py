"""Patterns and masks."""

from __future__ import annotations

import pytest
import torch
from pydantic import ValidationError

from compress.prune import METHODS
from compress.prune.patterns import keep_largest, parse
from runtime.errors import RequestError


def scores(out: int = 8, columns: int = 48) -> torch.Tensor:
    # Few distinct values, so that ties are everywhere.
    return torch.randint(0, 5, (out, columns), generator=torch.Generator().manual_seed(0)).float()


@pytest.mark.parametrize("text", ["2:4", "1:4", "4:8", "3:6", "1:16", "5:6"])
def test_n_of_m(text: str) -> None:
    pattern = parse(text)
    assert str(pattern) == text
    mask = pattern.mask(scores(), 0.0)
    assert (mask.reshape(-1, pattern.m).sum(1) == pattern.n).all()
    kept = scores().masked_fill(~mask, torch.inf).reshape(-1, pattern.m).amin(1)
    gone = scores().masked_fill(mask, -torch.inf).reshape(-1, pattern.m).amax(1)
    assert (gone <= kept).all()


@pytest.mark.parametrize("sparsity", [0.0, 0.1, 0.5, 0.77, 0.99])
@pytest.mark.parametrize("per_row", [False, True])
def test_unstructured_counts_are_exact_in_spite_of_ties(sparsity: float, per_row: bool) -> None:
    mask = parse(None).mask(scores(), sparsity, per_row)
    if per_row:
        assert ((~mask).sum(1) == round(sparsity * 48)).all()
    else:
        assert int((~mask).sum()) == round(sparsity * mask.numel())
    assert torch.equal(mask, parse("unstructured").mask(scores(), sparsity, per_row))


def test_blocks_go_whole() -> None:
    pattern = parse("block:4x8")
    mask = pattern.mask(scores(), 0.5)
    blocks = mask.reshape(2, 4, 6, 8).permute(0, 2, 1, 3).reshape(12, 32)
    assert set(blocks.sum(1).tolist()) == {0, 32}
    assert int((~mask).sum()) == mask.numel() // 2


@pytest.mark.parametrize("n", [10, 100])
def test_keep_largest_edges(n: int) -> None:
    x = torch.zeros(2, n)
    assert keep_largest(x, n).all()
    assert not keep_largest(x, 0).any()
    assert keep_largest(x, 3).sum(1).tolist() == [3, 3]


@pytest.mark.parametrize("text", ["4:2", "0:4", "2:4:8", "block:0x4", "diagonal", "block:4"])
def test_unknown_patterns_are_refused(text: str) -> None:
    with pytest.raises(RequestError, match="pattern '"):
        parse(text)


def test_widths_that_do_not_divide_are_refused() -> None:
    with pytest.raises(RequestError, match=r"down_proj: pattern '2:4' .* 8 x 42"):
        parse("2:4").check((8, 42), "down_proj")
    with pytest.raises(RequestError, match="pattern"):
        parse("block:4x4").check((6, 8))


def test_contradictions_in_the_fields_are_refused() -> None:
    config = METHODS["magnitude"].config
    with pytest.raises(ValidationError, match=r"0\.5, not 0\.7"):
        config(pattern="2:4", sparsity=0.7)
    with pytest.raises(ValidationError, match="sparsity"):
        config()
    with pytest.raises(ValidationError, match="allocation"):
        config(pattern="2:4", allocation="owl")
    assert config(pattern="1:4").target_sparsity == 0.75


@pytest.mark.parametrize("name", METHODS)
def test_every_field_of_every_method_is_explained(name: str) -> None:
    method = METHODS[name]
    assert method.config.__doc__
    assert method.paper
    assert all(field.description for field in method.config.model_fields.values())
