"""Outlier tokens that were planted are found, and nothing is found where nothing was."""

from __future__ import annotations

from typing import Any

import torch
from kv_models import llama, rows

from compress.kv_cache.calibrate import OutlierTokens
from compress.kv_cache.view import CalibrationView


def _find(
    model: Any, ids: torch.Tensor, start: int | None = None, ratio: float = 64.0
) -> tuple[list[int], dict[str, Any]]:
    outliers = OutlierTokens(ratio)
    CalibrationView(model, None, ids).observe(outliers)
    return outliers.finish(start)


def _planted(*tokens: int) -> Any:
    """A model whose first block drives one channel of its MLP very high at these tokens, through the norm."""
    model = llama()
    model.model.embed_tokens.weight[:, 0] = 0
    for token in tokens:
        model.model.embed_tokens.weight[token] = 0
        model.model.embed_tokens.weight[token, 0] = 1
    first = model.model.layers[0]
    first.self_attn.o_proj.weight.zero_()
    first.mlp.gate_proj.weight[0, 0] = first.mlp.up_proj.weight[0, 0] = 30
    return model


def test_no_outliers_no_prefix() -> None:
    tokens, facts = _find(llama(), rows())
    assert tokens == []
    assert "exceed 64 times the median" in facts["reason"]
    assert facts["largest"] < 64
    assert _find(llama(), rows(), start=3)[0] == []


def test_a_planted_token_is_found() -> None:
    ids = rows(low=8)
    ids[:, 5] = ids[:, 20] = 7
    tokens, facts = _find(_planted(7), ids)
    assert tokens == [7]
    assert facts["outliers"] == 2
    assert facts["initial"] == 0
    assert _find(_planted(7), ids, start=3)[0] == [3, 7]
    assert _find(_planted(7), ids, start=7)[0] == [7]  # not twice


def test_the_most_frequent_come_first_and_only_as_many_as_a_row_has() -> None:
    ids = rows(low=8)
    ids[:, 5] = 6
    ids[:4, 9] = 7
    ids[:1, 11] = 5
    tokens, facts = _find(_planted(5, 6, 7), ids)
    assert tokens == [6, 7]  # 11 outliers in 6 rows
    assert [token for token, _ in facts["frequent"]] == [6, 7, 5]


def test_first_tokens_count_and_are_not_named() -> None:
    ids = rows(low=8)
    ids[:, 0] = 7
    tokens, facts = _find(_planted(7), ids)
    assert tokens == []
    assert facts["initial"] == 1
    assert "first tokens only" in facts["reason"]
    assert _find(_planted(7), ids, start=7)[0] == [7]


def test_one_rare_token_is_chance() -> None:
    ids = rows(12, low=8)
    ids[0, 5] = 7
    tokens, facts = _find(_planted(7), ids)
    assert tokens == []
    assert "too rare" in facts["reason"]
