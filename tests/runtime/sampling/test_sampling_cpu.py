"""The fast rows on CPU against the plain functions of sampling.py."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from runtime.errors import CompressError
from runtime.sampling import sampling
from runtime.sampling import sampling as sampling_cpu
from runtime.sampling.options import GenerationOptions

OPTIONS = [
    {"top_k": 7},
    {"top_p": 0.8},
    {"min_p": 0.05},
    {"top_p": 0.99},
    {"top_p": 1e-9},
    {"top_k": 900, "top_p": 0.9, "min_p": 0.01},
    {"top_k": 5000},
    {"min_p": 1.0},
    {},
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("vocab", [1, 5, 97, 3000])
@pytest.mark.parametrize("spread", [0.1, 3.0, 30.0])
def test_the_same_tokens_are_kept_and_drawn(options: dict[str, float], vocab: int, spread: float) -> None:
    for seed in range(4):
        logits = torch.randn(2, vocab, generator=torch.Generator().manual_seed(seed)) * spread
        asked = GenerationOptions(temperature=0.7, **options)  # type: ignore[arg-type]
        expected = sampling.process(logits, None, asked)
        for row, plain in zip(sampling.scale(logits, 0.7).numpy(), expected, strict=True):
            kept = sampling_cpu.candidates(row, row.max(), asked)
            found = np.arange(vocab) if kept is None else kept
            assert found.tolist() == torch.isfinite(plain).nonzero()[:, 0].tolist()
        sources = [[torch.Generator().manual_seed(seed + i) for i in range(2)] for _ in range(2)]
        drawn = sampling.next_tokens(logits, None, asked, sources[0])
        assert drawn.tolist() == sampling.draw(expected, sources[1]).tolist()


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.sampled_from([0.0, 1.0, 2.0, -40.0, float("-inf")]), min_size=1, max_size=12), st.sampled_from(OPTIONS)
)
def test_ties_are_resolved_alike(values: list[float], options: dict[str, float]) -> None:
    logits = torch.tensor([[*values, 1.0]])
    asked = GenerationOptions(temperature=1.0, **options)  # type: ignore[arg-type]
    row = logits[0].numpy()
    kept = sampling_cpu.candidates(row, row.max(), asked)
    found = np.arange(len(row)) if kept is None else kept
    plain = torch.isfinite(sampling.process(logits, None, asked)[0])
    assert [i for i in found.tolist() if np.isfinite(row[i])] == plain.nonzero()[:, 0].tolist()


@pytest.mark.parametrize("uniform", [0.0, 1.0 - 2**-53])
def test_the_ends_of_the_interval_are_possible_tokens(uniform: float) -> None:
    row = np.array([-np.inf, 0.0, -np.inf, 3.0, -2000.0, -np.inf], np.float32)
    for options in ({}, {"top_k": 3}, {"top_p": 0.99999}, {"min_p": 1e-9}):
        asked = GenerationOptions(temperature=1.0, **options)  # type: ignore[arg-type]
        assert sampling_cpu.draw_on_cpu(row, asked, uniform) == (1 if uniform == 0 else 3)


def test_draws_follow_the_distribution() -> None:
    row = np.array([0.0, 1.0, -np.inf, 2.0, -1.0], np.float32)
    asked = GenerationOptions(temperature=1.0)
    numbers = (np.arange(20_000) + 0.5) / 20_000
    observed = np.bincount([sampling_cpu.draw_on_cpu(row, asked, u) for u in numbers], minlength=5)
    expected = np.exp(row.astype(float)) / np.exp(row.astype(float)).sum() * 20_000
    assert np.abs(observed - expected).max() <= 2


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_broken_logits_are_an_error(bad: float) -> None:
    logits = torch.zeros(3, 9)
    logits[1, 4] = bad
    with pytest.raises(CompressError, match="NaN"):
        sampling.next_tokens(logits, None, GenerationOptions(temperature=1.0), [torch.Generator()] * 3)
