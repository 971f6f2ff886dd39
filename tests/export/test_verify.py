"""The tools of proofs: what they must not let pass."""

from __future__ import annotations

import pytest
import torch

from export.verify import Probe, compare_logits
from runtime.errors import CompressError


def test_a_divergence_that_is_no_number_is_no_agreement() -> None:
    """An artifact with logits of minus infinity: the divergence is NaN, and NaN is above no limit."""
    logits = torch.zeros(1, 2, 4)
    logits[..., 0] = float("-inf")
    probe = Probe([[0]], torch.zeros(1, 2, dtype=torch.int64), logits, [[1]])
    with pytest.raises(CompressError, match="KL nan"):
        compare_logits(probe, lambda rows: torch.zeros(1, 2, 4), 1.0)


def test_agreement_within_the_limit() -> None:
    torch.manual_seed(0)
    logits = torch.randn(1, 2, 4)
    probe = Probe([[0]], torch.zeros(1, 2, dtype=torch.int64), logits, [[1]])
    assert compare_logits(probe, lambda rows: logits, 1e-9)["kl"] == pytest.approx(0, abs=1e-7)
    with pytest.raises(CompressError, match="allowed 1e-09"):
        compare_logits(probe, lambda rows: logits.flip(-1), 1e-9)
