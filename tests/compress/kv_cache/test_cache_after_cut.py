"""A compressed cache of a model whose vocabulary was cut: its quality is measured in other tokens than the source's."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
from random_models import UNLIMITED

import compress
from compress.cli import main
from compress.evaluate import through_cache as module
from compress.recipe import load
from compress.run.session import Session
from runtime.errors import RequestError

BUNDLED = Path(__file__).resolve().parents[3] / "recipes" / "checkpoints" / "stdlib-4m"
CUT = {"structure": {"method": "frequency", "remove": "vocabulary", "keep": 3072}}
CACHE = {"kv_cache": {"keys": "int2", "values": "int2", "recent": 16}}


def request(*stages: dict[str, Any]) -> dict[str, Any]:
    return {
        "name": "test",
        "model": str(BUNDLED),
        "calibration": {"samples": 16, "sequence_length": 64},
        "stages": list(stages),
        "evaluate": {
            **UNLIMITED,
            "sequence_length": 128,
            "samples": 8,
            "max_perplexity": 1e6,
            "max_perplexity_increase": "100000%",
        },
    }


def test_static_activations_behind_a_prefix_are_refused(tmp_path: Path) -> None:
    static = {"method": "rtn", "scheme": "W8A8", "activation_mode": "static"}
    with pytest.raises(RequestError, match=r"stages\.1\.quantize\.activation_mode: .* vocabulary is cut"):
        compress.apply(
            request(CUT, {"quantize": static}, {"kv_cache": "prefixquant"}), output=tmp_path / "out", quiet=True
        )


@pytest.mark.slow
def test_weights_and_cache_together_are_counted_a_token_of_the_source(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    lost = 0.25  # nats a token of the artifact's
    real = module.through_cache

    def measured(*arguments: Any) -> dict[str, Any]:
        return real(*arguments) | {"perplexity_increase_with_cache": math.exp(lost) - 1}

    monkeypatch.setattr(module, "through_cache", measured)
    made = compress.apply(request(CUT, CACHE), output=tmp_path / "out", quiet=True)
    metrics = made.metrics
    session = Session.open(load(request(CUT)))
    theirs, ours = session.context.same_text()
    # A window's first token is not scored.
    letters = [int(spans.characters[:, 1:].sum()) for spans in (theirs, ours)]
    counts = [spans.ids[:, 1:].numel() for spans in (theirs, ours)]
    each = (letters[0] / counts[0]) / (letters[1] / counts[1])
    assert each > 1.05, "what is missing is spelt in more tokens"
    assert metrics["tokens_each"] == pytest.approx(each)
    # The same loss, a character: that of the weights, and what the cache adds to every token.
    loss = metrics["after"]["bits_per_character"] * math.log(2) + lost / (letters[1] / counts[1])
    perplexity = math.exp(loss * letters[0] / counts[0])
    assert metrics["perplexity_increase_overall"] == pytest.approx(perplexity / metrics["before"]["perplexity"] - 1)
    limits = {limit["name"]: limit["value"] for limit in metrics["limits"]}
    assert limits["max_perplexity_overall"] == pytest.approx(perplexity)
    assert limits["max_perplexity_increase_overall"] == pytest.approx(metrics["perplexity_increase_overall"])
    assert main(["inspect", str(made.path)]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert f"{each:.3f} of which span one token of the source" in shown
    assert "of a plain cache (" in shown
    assert f"{each:.3f} of which span one token" in (made.path / "report.html").read_text().replace("&#x27;", "'")


def test_with_the_same_tokens_nothing_is_said_of_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made = compress.apply(request(CACHE), output=tmp_path / "out", quiet=True)
    metrics = made.metrics
    assert "tokens_each" not in metrics
    together = (1 + metrics["perplexity_increase"]) * (1 + metrics["perplexity_increase_with_cache"])
    assert metrics["perplexity_increase_overall"] == pytest.approx(together - 1)
    assert main(["inspect", str(made.path)]) == 0
    assert "of which span" not in capsys.readouterr().out
