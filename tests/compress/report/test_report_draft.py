"""What the report page says of drafts: both sides of training, for every kind of text."""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import Any

from compress.distill.draft.stage import draft_section

WAYS = ("greedy", "sampling")


def run(first: float, accepted: float) -> dict[str, Any]:
    return {
        "acceptance": first, "by_position": [first, 0.5, None], "accepted": accepted, "tokens": accepted + 1, "steps": 12.4,
    }  # fmt: skip


def measured(first: float, accepted: float, ways: Any = WAYS) -> dict[str, Any]:
    return {"length": 3, "text": None, "continuations": {way: run(first, accepted) for way in ways}}


def promised(speedup: float, ways: Any = WAYS) -> dict[str, Any]:
    return {way: {"cost": 0.127, "length": 2, "speedup": speedup} for way in ways}


def page(method: str, **known: Any) -> str:
    facts: Any = SimpleNamespace(manifest={"draft": {"method": method, "facts": known}})
    return draft_section(facts.manifest)


def lines(html: str) -> list[list[str]]:
    """The cells of every row of the table."""
    return [re.findall(r"<td[^>]*>(.*?)</td>", row) for row in re.findall(r"<tr>(.*?)</tr>", html)[1:]]


def test_both_sides_of_training_are_in_the_table() -> None:
    kinds = ("held_out", "text", "code", "chat")
    html = page(
        "distillspec",
        layers=[0, 3],
        cost={"bytes": 2048, "of_target": 0.127, "tokens": 1},
        before={kind: measured(0.31, 0.42) for kind in kinds},
        after={kind: measured(0.84, 1.87) for kind in kinds},
        worth={
            "before": {kind: promised(1.04) for kind in kinds},
            "after": {kind: promised(1.93) for kind in kinds},
        },
    )
    found = lines(html)
    assert len(found) == 16
    names = ("held-out rows", "prose", "code", "conversation")
    for index, name in enumerate(f"{name}, {way}" for name in names for way in WAYS):
        before, after = found[2 * index : 2 * index + 2]
        assert before == [name, "before", "31.0%", "31%  50%  –", "0.42 of 3", "12", "12.7%", "1.04× with 2"]
        assert after == ["", "after", "84.0%", "84%  50%  –", "1.87 of 3", "12", "12.7%", "1.93× with 2"]
    assert "layers 0, 3 of the artifact" in html
    assert "for a token, 12.7%" in html


def test_what_could_not_be_measured_is_a_dash() -> None:
    short = {"length": 3, "text": None, "continuations": {"greedy": None, "sampling": run(0.5, 1.0)}}
    html = page(
        "medusa",
        cost={"bytes": 2048, "of_target": 0.3, "tokens": 4},
        before={"held_out": short},
        after={"held_out": short},
        worth={when: {"held_out": promised(1.5, ["sampling"])} for when in ("before", "after")},
    )
    found = lines(html)
    assert found[1] == ["", "after", "–", "–", "–", "–", "–", "–"]
    assert found[3][-1] == "1.50× with 2"
    assert "for 4 tokens at once, 30.0%" in html


def test_a_search_is_told_and_measured_on_other_rows() -> None:
    html = page(
        "skip",
        skip_attention=[2, 5],
        skip_mlp=[],
        cost={"bytes": 4096, "of_target": 0.6, "tokens": 1},
        search={
            "rates": [0.9, 0.8], "length": 2, "speedup": 1.31, "curve": [1.0, 1.2, 1.31],
            "evenly": {"skip_attention": [1, 4], "skip_mlp": []},
        },
        before={"held_out": measured(0.2, 0.3, ["greedy"])},
        after={"held_out": measured(0.7, 1.1, ["greedy"])},
        worth={when: {"held_out": promised(1.2, ["greedy"])} for when in ("before", "after")},
    )  # fmt: skip
    assert [row[:3] for row in lines(html)] == [["held-out rows, greedy", "before", "20.0%"], ["", "after", "70.0%"]]
    assert "leaves out the attention of layers 2, 5" in html
    assert "Found among 3 sets" in html
    assert "1.31× with 2, accepted by position 90%  80%." in html
    assert "as many halves left out evenly: the attention of layers 1, 4" in html


def test_the_curve_says_that_it_is_of_weights_in_training() -> None:
    looks = [{"step": step, "acceptance": 0.5, "agreement": 0.4} for step in (0, 5)]
    curve = {"held_out": looks, "train": []}
    html = page("distillspec", training={"curve": curve, "steps": 5, "best_step": 5, "ended": "steps"})
    assert "of the weights in training; the table, after training, of the draft as it is stored" in html
