"""Limits on quality: defaults by bits and zeros, what they catch, and texts that a model does not read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import compress
from compress.cli import main
from compress.core.resources import bundled_text, recipes_directory
from compress.evaluate import limits
from compress.evaluate.texts import doubt
from compress.model.stage import TensorPlan
from compress.recipe import load
from compress.run.run import LimitError
from compress.run.session import Session

MODELS = recipes_directory() / "checkpoints"
TWO_BITS = {"quantize": {"method": "gptq", "bits": 2, "group_size": 64}}


def layer(bits: float | None, sparsity: float = 0.0, size: int = 100) -> TensorPlan:
    return TensorPlan("x", "copied" if bits is None else "compressed", size, size // 4, bits=bits, sparsity=sparsity)


def recipe(*stages: dict[str, Any], **evaluate: Any) -> Any:
    return load({"name": "t", "model": "m", "stages": list(stages), "evaluate": evaluate})


@pytest.mark.parametrize(
    ("tensors", "kl", "agreement"),
    [
        ([layer(8)], 0.03, 0.9),
        ([layer(4)], 0.1, 0.8),
        ([layer(2)], 0.5, 0.6),
        ([layer(16, 0.5)], 0.3, 0.75),
        ([layer(4, 0.5)], 0.4, 0.55),
        ([layer(6)], 0.055, 0.85),  # between 4 and 8 bits: the mean of logarithms, and the mean
        ([layer(1.0)], 1.0, 0.5),
        ([layer(0.5)], 1.0, 0.5),
        ([layer(4, size=300), layer(2, size=100)], 0.2, 0.75),
        ([layer(2), layer(None, size=10**6)], 0.5, 0.6),  # what is copied counts for nothing
    ],
)
def test_usual_limits(tensors: list[TensorPlan], kl: float, agreement: float) -> None:
    assert limits.usual(tensors) == {"max_kl": pytest.approx(kl), "min_agreement": pytest.approx(agreement)}


def test_fewer_bits_and_more_zeros_are_never_allowed_less() -> None:
    by_bits = [limits.usual([layer(bits)]) for bits in (16, 8, 7, 6, 5, 4, 3.5, 3, 2.5, 2, 1.58, 1)]
    by_zeros = [limits.usual([layer(4, zeros / 10)]) for zeros in range(10)]
    for found in (by_bits, by_zeros):
        assert [one["max_kl"] for one in found] == sorted(one["max_kl"] for one in found)
        assert [-one["min_agreement"] for one in found] == sorted(-one["min_agreement"] for one in found)


def test_what_the_recipe_says_counts() -> None:
    tensors = [layer(4)]
    assert limits.limits(recipe(TWO_BITS), tensors) == limits.usual(tensors)
    assert limits.limits(recipe(TWO_BITS, max_kl=0.7), tensors) == {"max_kl": 0.7, "min_agreement": 0.8}
    assert limits.limits(recipe(TWO_BITS, max_kl="none", min_agreement=None), tensors) == {}
    assert limits.limits(recipe(TWO_BITS, min_agreement="95%", max_perplexity=9.0), tensors) == {
        "max_kl": 0.1, "min_agreement": 0.95, "max_perplexity": 9.0,
    }  # fmt: skip
    assert limits.limits(recipe(TWO_BITS), tensors, encoder=True) == {}
    assert limits.limits(recipe(TWO_BITS), [layer(None)]) == {}
    cut = {"structure": {"method": "obs", "remove": "ffn", "ratio": "20%"}}
    assert limits.limits(recipe(cut, TWO_BITS), tensors) == {}
    resolved = load(recipe(TWO_BITS, max_kl=None).resolved())
    assert resolved.evaluate.max_kl == "none", "a resolved recipe means the same"


@pytest.mark.parametrize(
    ("metrics", "told"),
    [
        ({"perplexity_increase": -0.083, "kl": 0.38}, "falls by 8.3%"),
        ({"perplexity_increase": -0.001, "kl": 0.001}, ""),
        ({"perplexity_increase": 0.5, "kl": 0.38}, ""),
        ({"perplexity_increase": -0.5}, ""),
        ({}, ""),
    ],
)
def test_a_perplexity_that_falls_while_predictions_change(metrics: dict[str, float], told: str) -> None:
    found = limits.contradiction(metrics)
    assert told in found
    assert bool(found) is bool(told)


@pytest.mark.parametrize(("model", "reads"), [("stdlib-4m", True), ("recall-1m", False)])
def test_a_model_that_does_not_read_the_text(model: str, reads: bool) -> None:
    sets = ["stages.0.quantize.group_size=64", "evaluate.samples=16", "calibration.samples=4"]
    found = doubt(Session.open(load("llama_w4", model=MODELS / model, set=sets), "cpu").context)
    assert bool(found) is not reads
    if not reads:
        assert "recall-1m cannot predict this text" in found[0]
        assert "worse than is plausible for a vocabulary of 4,096 tokens (at most 147)" in found[0]
        assert "the bundled held-out text, 16 rows of 256 tokens" in found[0]


FEW = ["calibration.samples=16", "calibration.sequence_length=128", "evaluate.samples=16"]


@pytest.mark.slow
def test_a_ruined_model_on_text_that_it_does_not_read_fails(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["apply", "llama_w4", "-m", str(MODELS / "recall-1m"), "-o", str(tmp_path / "out"), "-q"]
    sets = [f"--set=stages.0.quantize.{field}" for field in ("group_size=64", "bits=2")]
    assert main([*arguments, *sets, *(f"--set={field}" for field in FEW)]) == 1
    out, err = capsys.readouterr()
    assert "max_kl is " in err
    assert "the limit is 0.5" in err
    assert "cannot predict this text" in out


@pytest.mark.slow
@pytest.mark.parametrize("own", [False, True])
def test_a_ruined_model_on_its_own_text_fails(tmp_path: Path, own: bool) -> None:
    """2 bits, rounded to nearest: without own text the bundled one, and with it the part that is held out."""
    (tmp_path / "mine.txt").write_bytes(bundled_text("calibration").read_bytes())
    sets = ["stages.0.quantize.method=rtn", "stages.0.quantize.bits=2", "stages.0.quantize.group_size=64"]
    sets += [f"calibration.data={tmp_path / 'mine.txt'}"] if own else []
    sets += FEW
    with pytest.raises(LimitError, match=r"max_kl is .*min_agreement is ") as failure:
        compress.apply("llama_w4", output=tmp_path / "out", set=sets, quiet=True)
    metrics = failure.value.result.metrics
    assert metrics["text"].startswith("the held-out part of the file mine.txt" if own else "the bundled held-out text")
    assert {limit["name"] for limit in metrics["limits"] if not limit["ok"]} >= {"max_kl", "min_agreement"}
