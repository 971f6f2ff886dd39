"""What the commands say before a draft is made, and of one that was."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from compress.commands.output import show_draft
from compress.recipe import load
from compress.run.plan import make_plan

RECIPES = Path(__file__).resolve().parents[3] / "recipes"


def measured(rate: float, alone: bool = False) -> dict[str, Any]:
    ways = {"greedy": {"acceptance": rate}, "sampling": {"acceptance": 0.9}}
    return {"text": ways, "continuations": None if alone else ways}


def worth(speedup: float) -> dict[str, Any]:
    return {"after": {"held_out": {"greedy": {"speedup": speedup}}}}


def test_acceptance_and_what_it_promises_are_shown(capsys: pytest.CaptureFixture[str]) -> None:
    facts = {"before": {"held_out": measured(0.25)}, "after": {"held_out": measured(0.5, alone=True)}}
    show_draft({"method": "pard", "facts": {**facts, "worth": worth(1.75)}})
    said = capsys.readouterr().out
    assert all(word in said for word in ("pard", "held-out", "25.0%", "50.0%", "1.75x"))
    assert "No speedup is predicted" not in said
    show_draft({"method": "pard", "facts": {**facts, "worth": worth(1.0)}})
    assert "No speedup is predicted" in capsys.readouterr().out
    show_draft({"method": "pard", "facts": {**facts, "worth": {"after": {}}}})  # greedy drafts only were not measured
    assert "No speedup is predicted" not in capsys.readouterr().out
    show_draft({"method": "skip", "facts": {}})  # nothing was measured
    assert "speedup is predicted" not in capsys.readouterr().out


def test_a_plan_says_that_a_draft_comes_on_top(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    plan = make_plan(load(RECIPES / "llama_w4_draft.yaml"), tmp_path / "out")
    assert plan.draft is not None
    assert "steps of training" in plan.draft
    assert plan.headline().endswith(f"what the draft takes ({plan.draft})")
    plain = make_plan(load(RECIPES / "llama_w4_sparse.yaml"), tmp_path / "out")
    assert plain.draft is None
    assert "draft" not in plain.headline()
