"""Sampling: every filter against a brute-force definition and against transformers, draws against their distribution."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from transformers.generation import logits_process as reference

from runtime.errors import CompressError, RequestError
from runtime.sampling import sampling
from runtime.sampling.options import GenerationOptions

SEEDS = range(5)


def random_logits(seed: int, rows: int = 4, vocab: int = 97) -> torch.Tensor:
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * 3


def kept(logits: torch.Tensor) -> list[set[int]]:
    return [set(torch.isfinite(row).nonzero()[:, 0].tolist()) for row in logits]


def softmax(row: list[float]) -> list[float]:
    top = max(row)
    weights = [math.exp(value - top) for value in row]
    return [weight / sum(weights) for weight in weights]


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("k", [1, 2, 10, 97, 1000])
def test_top_k(seed: int, k: int) -> None:
    logits = random_logits(seed)
    result = sampling.keep_top_k(logits, k)
    brute = [set(sorted(range(97), key=lambda i: -row[i])[:k]) for row in logits.tolist()]
    assert kept(result) == brute
    assert torch.equal(result, reference.TopKLogitsWarper(k)(None, logits))


def test_top_k_keeps_ties_like_transformers() -> None:
    logits = torch.tensor([[1.0, 2.0, 2.0, 0.0]])
    assert kept(sampling.keep_top_k(logits, 1)) == [{1, 2}] == kept(reference.TopKLogitsWarper(1)(None, logits))


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("p", [1e-6, 0.1, 0.5, 0.9, 0.999, 1.0])
def test_top_p(seed: int, p: float) -> None:
    logits = random_logits(seed)
    result = sampling.keep_top_p(logits, p)
    for row, mine in zip(logits.double().tolist(), kept(result), strict=True):
        probabilities = softmax(row)
        total, nucleus = 0.0, set()
        for token in sorted(range(97), key=lambda i: -probabilities[i]):
            nucleus.add(token)
            total += probabilities[token]
            if total >= p and p < 1:
                break
        assert mine == nucleus
    if p < 1:
        assert torch.equal(result, reference.TopPLogitsWarper(p)(None, logits))


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("minimum", [0.0, 0.01, 0.2, 1.0])
def test_min_p(seed: int, minimum: float) -> None:
    logits = random_logits(seed)
    result = sampling.keep_min_p(logits, minimum)
    for row, mine in zip(logits.tolist(), kept(result), strict=True):
        probabilities = softmax(row)
        assert mine == {i for i, q in enumerate(probabilities) if q >= minimum * max(probabilities)}
    assert torch.equal(result, reference.MinPLogitsWarper(minimum)(None, logits))


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("penalty", [0.5, 1.0, 1.3])
def test_repetition_penalty(seed: int, penalty: float) -> None:
    logits = random_logits(seed)
    tokens = torch.randint(97, (4, 20), generator=torch.Generator().manual_seed(seed))
    seen = torch.zeros(4, 97, dtype=torch.bool).scatter(1, tokens, True)
    result = sampling.repetition_penalty(logits, seen, penalty)
    for row in range(4):
        for token in range(97):
            value = float(logits[row, token])
            expected = value if token not in tokens[row] else (value / penalty if value > 0 else value * penalty)
            assert math.isclose(float(result[row, token]), expected, rel_tol=1e-6)
    warper = reference.RepetitionPenaltyLogitsProcessor(penalty)
    assert torch.allclose(result, warper(tokens, logits.clone()), rtol=1e-6, atol=0)


@pytest.mark.parametrize("seed", SEEDS)
def test_order_of_the_filters_is_that_of_transformers(seed: int) -> None:
    logits = random_logits(seed)
    tokens = torch.randint(97, (4, 20), generator=torch.Generator().manual_seed(seed))
    seen = torch.zeros(4, 97, dtype=torch.bool).scatter(1, tokens, True)
    options = GenerationOptions(temperature=0.7, top_k=40, top_p=0.9, min_p=0.05, repetition_penalty=1.2)
    expected = reference.RepetitionPenaltyLogitsProcessor(1.2)(tokens, logits.clone())
    for warper in (
        reference.TemperatureLogitsWarper(0.7),
        reference.TopKLogitsWarper(40),
        reference.TopPLogitsWarper(0.9),
        reference.MinPLogitsWarper(0.05),
    ):
        expected = warper(tokens, expected)
    assert torch.allclose(sampling.process(logits, seen, options), expected, rtol=1e-6, atol=0)


def test_draws_follow_the_distribution() -> None:
    logits = torch.tensor([[0.0, 1.0, float("-inf"), 2.0, -1.0]])
    generator = torch.Generator().manual_seed(0)
    count = 20_000
    drawn = sampling.draw(logits.expand(count, -1), [generator] * count)
    observed = torch.bincount(drawn, minlength=5).double()
    expected = torch.softmax(logits[0].double(), 0) * count
    assert observed[2] == 0
    chi_square = ((observed - expected) ** 2 / expected.clamp(min=1e-9))[[0, 1, 3, 4]].sum()
    assert chi_square < 16.3  # 99.9 % quantile, 3 degrees of freedom


@pytest.mark.parametrize("uniform", [0.0, 1.0 - 2**-53])
def test_draws_at_the_ends_of_the_interval_are_possible_tokens(uniform: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "rand", lambda *_, **__: torch.tensor(uniform, dtype=torch.float64))
    removed = float("-inf")
    logits = torch.tensor([[removed, 0.0, removed, 3.0, removed, removed]])
    assert sampling.draw(logits, [torch.Generator()]).tolist() == ([1] if uniform == 0 else [3])


def test_a_row_draws_the_same_in_any_batch() -> None:
    logits = random_logits(0)
    alone = [int(sampling.draw(logits[i : i + 1], [torch.Generator().manual_seed(i)])[0]) for i in range(4)]
    together = sampling.draw(logits, [torch.Generator().manual_seed(i) for i in range(4)]).tolist()
    assert together == alone


def test_greedy_is_argmax_whatever_the_filters() -> None:
    logits = random_logits(3)
    options = GenerationOptions(temperature=0.0, top_k=3, top_p=0.1, min_p=0.5)
    assert torch.equal(sampling.next_tokens(logits, None, options, []), logits.argmax(-1))


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_nan_logits_are_an_error(temperature: float) -> None:
    logits = random_logits(0)
    logits[2, 5] = float("nan")
    with pytest.raises(CompressError, match="NaN"):
        sampling.next_tokens(logits, None, GenerationOptions(temperature=temperature), [torch.Generator()] * 4)


BAD_OPTIONS: list[tuple[dict[str, Any], str]] = [
    ({"max_new_tokens": 0}, "max_new_tokens must be an integer >= 1, not 0"),
    ({"max_new_tokens": -3}, "max_new_tokens"),
    ({"max_new_tokens": 2.5}, "max_new_tokens"),
    ({"max_new_tokens": True}, "max_new_tokens"),
    ({"temperature": -0.1}, "temperature must be a number >= 0, not -0.1"),
    ({"temperature": float("nan")}, "temperature"),
    ({"temperature": float("inf")}, "temperature"),
    ({"temperature": "hot"}, "temperature"),
    ({"top_k": 0}, "top_k must be an integer >= 1"),
    ({"top_p": 0}, "top_p must be above 0 and at most 1, not 0"),
    ({"top_p": 1.1}, "top_p"),
    ({"min_p": -0.1}, "min_p must be between 0 and 1"),
    ({"min_p": 2}, "min_p"),
    ({"repetition_penalty": 0}, "repetition_penalty must be above 0"),
    ({"stop": ""}, "stop must be a non-empty text"),
    ({"stop": ["a", ""]}, "stop"),
    ({"stop": 3}, "stop"),
    ({"stop": [3]}, "stop"),
    ({"seed": -1}, "seed must be an integer >= 0"),
    ({"seed": 2**63}, "seed"),
    ({"seed": "x"}, "seed"),
    ({"seed": [1, None]}, "seed"),
    ({"ignore_eos": 1}, "ignore_eos must be True or False"),
    ({"max_new_token": 3}, "generate.. has no option 'max_new_token': did you mean 'max_new_tokens'?"),
    ({"temprature": 3}, "did you mean 'temperature'?"),
    ({"zzz": 3}, "allowed are max_new_tokens, temperature"),
    ({"num_beams": 4}, "generate.. has no option 'num_beams': .* transformers' own generate"),
    ({"num_return_sequences": 2}, r"`\[prompt\] \* n`"),
    ({"max_length": 20}, "use max_new_tokens"),
    ({"attention_mask": torch.ones(1, 2)}, "without padding"),
    ({"streamer": print}, "use stream"),
    ({"eos_token_id": 5}, "use stop for other endings"),
    ({"do_sample": 1}, "do_sample must be True or False"),
    ({"do_sample": True, "temperature": 0}, "needs a temperature above 0"),
    ({"do_sample": False, "temperature": 0.5}, "give only one of them"),
    ({"do_sample": True, "temperature": "hot"}, "temperature must be a number"),
]


@pytest.mark.parametrize(
    ("keywords", "message"), BAD_OPTIONS, ids=[f"{n} {next(iter(k))}" for n, (k, _) in enumerate(BAD_OPTIONS)]
)
def test_bad_options_are_one_sentence(keywords: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError, match=message) as caught:
        GenerationOptions.from_keywords(keywords, "generate")
    assert "\n" not in str(caught.value)


def test_options_of_transformers_that_have_an_equivalent() -> None:
    def read(**keywords: Any) -> GenerationOptions:
        return GenerationOptions.from_keywords(keywords, "generate", frozenset({2, 7}))

    nothing = {
        "num_beams": 1,
        "num_return_sequences": 1,
        "pad_token_id": 0,
        "eos_token_id": [7, 2],
        "streamer": None,
        "use_cache": True,
    }
    assert read(**nothing) == read(length_penalty=1) == GenerationOptions()
    assert read(do_sample=True) == read(temperature=1.0)
    assert read(do_sample=True, temperature=0.7, top_k=5) == read(temperature=0.7, top_k=5)
    assert read(do_sample=False, temperature=None) == read(do_sample=None) == GenerationOptions()
    assert read(stop_strings=["x"]) == read(stop="x")


def test_options_accept_the_usual_spellings() -> None:
    assert GenerationOptions.from_keywords({"stop": "x"}, "f").stop == ("x",)
    assert GenerationOptions.from_keywords({"stop": ["x", "y"]}, "f").stop == ("x", "y")
    assert GenerationOptions.from_keywords({"stop": None, "seed": [1, 2]}, "f").seed == (1, 2)
    assert GenerationOptions.from_keywords({}, "f") == GenerationOptions()
