"""What the report page says of recovery: its curves where they belong, what is known and no more, for every kind of model."""

from __future__ import annotations

import html
import math
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from xml.etree import ElementTree

import pytest
from encoder_models import bert, save

import compress
from compress.distill.draft.stage import training_chart
from compress.distill.recover.stage import recovery_sections

Points = list[tuple[float, float]]
TRAIN = [(10, 0.9, 2e-4), (20, 0.7, 1e-4), (30, 0.65, 0.0)]
LOOKS = [(0, 1.0, 2.9, 0.4), (10, 0.8, 2.6, 0.32), (20, 0.6, 2.5, 0.3), (30, 0.62, 2.52, 0.31)]


def recovery(**changes: Any) -> dict[str, Any]:
    looks = [dict(zip(("step", "loss", "cross_entropy", "kl"), look, strict=True)) for look in LOOKS]
    before, best = ({k: v for k, v in looks[place].items() if k != "step"} for place in (0, 2))
    train = [dict(zip(("step", "loss", "learning_rate"), entry, strict=True)) for entry in TRAIN]
    return {
        "recover": "finetune", "text": "0", "divergence": "forward_kl", "most_steps": 30, "batch_size": 4,
        "rows": {"trained": 112, "held_out": 16, "length": 64}, "steps": 30, "best_step": 20, "before": before, "after": best,
        "ended": "steps",
        "curve": {"train": train, "held_out": looks}, "perplexity_before": math.exp(2.9), "perplexity_after": math.exp(2.5), **changes,
    }  # fmt: skip


def page(*passes: dict[str, Any]) -> str:
    facts: Any = SimpleNamespace(manifest={"passes": list(passes)})
    return recovery_sections(facts.manifest)


def charts(text: str) -> dict[str, ElementTree.Element]:
    """The charts of a page by what their ids begin with, "recovery0-loss"."""
    found = {}
    for svg in re.findall(r"<svg.*?</svg>", text, re.DOTALL):
        element = ElementTree.fromstring(svg.replace("xlink:href", "href"))
        (name,) = {str(e.get("id")).removesuffix("-figure_1") for e in element.iter() if "figure_1" in e.get("id", "")}
        found[name] = element
    return found


def inside(chart: ElementTree.Element, name: str) -> ElementTree.Element | None:
    return next((e for e in chart.iter("g") if re.fullmatch(rf"[a-z0-9]+(-[a-z]+)?-{name}", e.get("id", ""))), None)


def ticks(chart: ElementTree.Element, axis: str) -> list[tuple[float, float]]:
    """Where the chart's first axes say that numbers are: (coordinate in the picture, number)."""
    found, axes = [], inside(chart, "axes_1")
    assert axes is not None
    for count in range(1, 40):
        tick = inside(axes, f"{axis}tick_{count}")
        if tick is not None and tick.find(".//text") is not None:
            (mark, *_), (label, *_) = list(tick.iter("use")), list(tick.iter("text"))
            if label.text:
                found.append((float(mark.get(axis, "")), float(label.text)))
    assert len(found) > 1
    return found


def measured(chart: ElementTree.Element, axis: str, at: float, log: bool) -> float:
    """The number at a coordinate, as a reader of the axis would find it."""
    marks = ticks(chart, axis)
    (one, low), (other, high) = marks[0], marks[-1]
    share = (at - one) / (other - one)
    return math.exp(math.log(low) + share * math.log(high / low)) if log else low + share * (high - low)


def points(chart: ElementTree.Element, line: str, log: bool = False) -> Points:
    """What a line of a chart shows, read from its markers against the ticks of the axes."""
    drawn = inside(chart, f"curve-{line}")
    assert drawn is not None
    markers = [(float(use.get("x", "")), float(use.get("y", ""))) for use in drawn.iter("use")]
    return [(measured(chart, "x", x, False), measured(chart, "y", y, log)) for x, y in markers]


def close(found: Points, expected: list[tuple[Any, ...]], rel: float = 1e-3) -> None:
    assert [pytest.approx(point, rel=rel, abs=1e-3) for point in expected] == found


def upright(chart: ElementTree.Element, line: str) -> float:
    """At which update a mark stands."""
    drawn = inside(chart, f"curve-{line}")
    assert drawn is not None
    (path,) = drawn.iter("path")
    xs = {float(x) for x, _ in re.findall(r"[ML] ([\d.]+) ([\d.]+)", path.get("d", ""))}
    assert len(xs) == 1
    return measured(chart, "x", xs.pop(), False)


def words(text: str) -> str:
    """What a page says outside of its charts."""
    plain = re.sub(r"<svg.*?</svg>", " ", text, flags=re.DOTALL)
    return html.unescape(" ".join(re.sub(r"<[^>]+>", " ", plain).split()))


def rows(text: str) -> list[list[str]]:
    return [re.findall(r"<td[^>]*>(.*?)</td>", row) for row in re.findall(r"<tr>(.*?)</tr>", text)[1:]]


def test_the_curve_is_where_its_numbers_are() -> None:
    found = charts(page(recovery()))
    assert list(found) == ["recovery0-loss", "recovery0-perplexity"]
    loss, perplexity = found.values()
    close(points(loss, "training"), [(step, value) for step, value, _ in TRAIN])
    close(points(loss, "held-out-rows"), [look[:2] for look in LOOKS])
    close(points(perplexity, "held-out-rows"), [(step, math.exp(value)) for step, _, value, _ in LOOKS])
    for chart in (loss, perplexity):
        assert upright(chart, "best-weights-after-20") == pytest.approx(20, abs=1e-3)
        assert inside(chart, "curve-diverged-after-30") is None


def test_the_charts_are_told_in_words_and_as_numbers() -> None:
    text = page(recovery())
    labels = [chart.get("aria-label") for chart in charts(text).values()]
    assert labels == [
        "loss by updates: training 0.9 after 10 updates to 0.65 after 30; held-out rows 1 after 0 updates to 0.62 after 30; "
        "best weights after 20",
        "perplexity by updates: held-out rows 18.17 after 0 updates to 12.43 after 30; best weights after 20",
    ]
    assert rows(text)[0] == ["0", "–", "–", "1", "0.4", "2.9", "18.174"]
    assert rows(text)[2] == ["20", "0.7", "0.0001", "0.6", "0.3", "2.5", "12.182"]
    assert "#010203" not in text
    assert "currentColor" in text


def test_the_sentence() -> None:
    text = words(page(recovery()))
    assert "Recovery by finetune" in text
    assert "for 30 updates: it went on to the last update, and the weights kept are those after 20." in text
    assert "read 4 of 112 rows of 64 tokens; 16 more were held out." in text
    assert "Perplexity of held-out rows: 18.174 → 12.182." in text
    assert "Divergence from the original of held-out rows: 0.4 → 0.3, so that 25.0% of it was won back." in text


@pytest.mark.parametrize(
    ("changes", "told", "untold"),
    [
        ({"ended": "patience", "most_steps": 90}, "for 30 of at most 90 updates: it ended early", "last update"),
        ({"best_step": 0}, "nothing was better than the weights it began with", "kept are"),
        ({"after": {"loss": 0.9, "kl": 0.41}}, "0.4 → 0.41, so that none of it was won back", "%"),
        # Its least is not 0: the original itself is not without it.
        ({"divergence": "cross_entropy"}, "Perplexity", "won back"),
        ({"before": {"loss": 2.9}, "after": {"loss": 2.5}}, "Perplexity", "won back"),
        ({"perplexity_before": None}, "Perplexity of held-out rows: – → 12.182", "nan"),
    ],
)
def test_what_is_known_is_told_and_no_more(changes: Any, told: str, untold: str) -> None:
    text = words(page(recovery(**changes)))
    assert told in text
    assert untold not in text


def test_no_recovery_no_section() -> None:
    assert page({"remove": "ffn"}) == ""
    facts: Any = SimpleNamespace(manifest={})
    assert recovery_sections(facts.manifest) == ""


def test_numbers_that_are_none_leave_gaps() -> None:
    made = recovery(ended="diverged", best_step=10)
    made["curve"]["train"][1]["loss"] = None
    made["curve"]["held_out"][2] |= {"loss": None, "cross_entropy": math.nan}
    made["curve"]["held_out"][3] |= {"loss": 40.0, "cross_entropy": 9.0}
    text = page(made)
    loss, perplexity = charts(text).values()
    close(points(loss, "training", log=True), [(10, 0.9), (30, 0.65)])
    close(points(loss, "held-out-rows", log=True), [(0, 1.0), (10, 0.8), (30, 40.0)])
    close(points(perplexity, "held-out-rows", log=True), [(0, math.exp(2.9)), (10, math.exp(2.6)), (30, math.exp(9))])
    path = next(inside(loss, "curve-held-out-rows").iter("path"))  # type: ignore[union-attr]
    assert path.get("d", "").count("L") == 1, "a line from 0 to 10, and none over the gap"
    assert upright(loss, "best-weights-after-10") == pytest.approx(10, abs=1e-3)
    assert upright(perplexity, "diverged-after-30") == pytest.approx(30, abs=1e-3)
    assert rows(text)[2] == ["20", "–", "0.0001", "–", "0.3", "–", "–"]
    assert "it ended as the loss diverged, and the weights kept are those after 10" in words(text)
    assert "nan" not in text.lower()


def test_numbers_too_large_to_be_drawn() -> None:
    made = recovery()
    made["curve"]["held_out"][3] |= {"loss": 1e30, "cross_entropy": 1e5}
    loss, perplexity = charts(page(made)).values()
    close(points(loss, "held-out-rows", log=True)[-1:], [(30, 1e30)], rel=0.05)
    assert len(points(perplexity, "held-out-rows")) == 3


def test_nothing_but_gaps_is_no_chart() -> None:
    made = recovery(ended="diverged", perplexity_before=None, perplexity_after=None)
    made["curve"] = {"train": [], "held_out": [{"step": 0, "loss": None, "cross_entropy": None}]}
    text = page(made)
    assert charts(text) == {}
    assert rows(text) == [["0", "–", "–", "–", "–", "–"]]


def test_every_width_of_nested_ones_has_a_line() -> None:
    made = recovery(before={"loss": 1.0, "loss_96": 1.5, "kl": 0.5}, after={"loss": 0.8, "loss_96": 1.2, "kl": 0.4})
    for look in made["curve"]["held_out"]:
        look |= {"loss_96": look["loss"] + 0.5, "cross_entropy_96": look["cross_entropy"] + 0.5}
    text = page(made)
    loss, perplexity = charts(text).values()
    close(points(loss, "96-channels"), [(step, value + 0.5) for step, value, *_ in LOOKS])
    close(points(loss, "held-out-rows-mean-of-the-widths"), [look[:2] for look in LOOKS])
    close(points(perplexity, "96-channels"), [(step, math.exp(value + 0.5)) for step, _, value, _ in LOOKS])
    assert "Perplexity of held-out rows, mean of the widths: " in words(text)
    assert "cross-entropy, 96 channels" in words(text)
    assert "won back" not in words(text), "narrow widths were never what the original is"


def test_many_points_are_a_line_without_markers() -> None:
    made = recovery()
    made["curve"]["train"] = [{"step": step, "loss": 1 / step, "learning_rate": 1e-4} for step in range(1, 200)]
    assert points(charts(page(made))["recovery0-loss"], "training") == []


def stages(steps: int, squarehead_only: bool = False) -> list[dict[str, Any]]:
    own: dict[str, Any] = {"samples": 24, "sequence_length": 32, "steps": steps, "batch_size": 4, "evaluate_every": 2}
    first = {"recover": {"method": "finetune", **own}}
    if squarehead_only:
        return [{"prune": {"method": "magnitude", "sparsity": 0.5}}, first]
    again = {"recover": {"method": "lora", "rank": 4, **own, "steps": 2 * steps}}
    return [
        {"structure": {"method": "magnitude", "ratio": 0.25}},
        first,
        {"prune": {"method": "wanda", "pattern": "2:4"}},
        again,
    ]


def made_of(source: Path, text: Path, output: Path, asked: list[dict[str, Any]]) -> tuple[list[dict[str, Any]], str]:
    calibration = {"data": str(text), "samples": 8, "sequence_length": 32}
    recipe = {"model": str(source), "name": "x", "calibration": calibration, "stages": asked}
    made = compress.apply(recipe, output=output, quiet=True)
    return made.manifest["passes"], (output / "report.html").read_text(encoding="utf-8")


def test_two_recoveries_of_a_real_run(tiny_llama: Any, tiny_text: Path, tmp_path: Path) -> None:
    passes, text = made_of(tiny_llama(), tiny_text, tmp_path / "out", stages(4))
    made = [facts for facts in passes if "recover" in facts]
    assert "Recovery 1 of 2 by finetune" in text
    assert "Recovery 2 of 2 by lora" in text
    assert text.count("Each update read 4 of 21 rows of 32 tokens; 3 more were held out.") == 2
    for place, facts in enumerate(made):
        drawn = charts(text)
        looks, train = facts["curve"]["held_out"], facts["curve"]["train"]
        assert [look["step"] for look in looks] == list(range(0, 4 * (place + 1) + 1, 2))[: len(looks)]
        loss = drawn[f"recovery{place}-loss"]
        close(points(loss, "held-out-rows"), [(look["step"], look["loss"]) for look in looks])
        close(points(loss, "training"), [(entry["step"], entry["loss"]) for entry in train])
        expected = [(look["step"], math.exp(look["cross_entropy"])) for look in looks]
        close(points(drawn[f"recovery{place}-perplexity"], "held-out-rows"), expected)
        assert f"{facts['perplexity_before']:.5g} → {facts['perplexity_after']:.5g}" in text
    ids = re.findall(r'\bid="([^"]+)"', text)
    assert len(ids) == len(set(ids))


def test_an_encoder_has_no_perplexity(tiny_text: Path, tmp_path: Path) -> None:
    source = save(bert(), tmp_path / "model")
    (facts,), text = made_of(source, tiny_text, tmp_path / "out", stages(4, squarehead_only=True))
    drawn = charts(text)
    assert "recovery0-loss" in drawn
    assert "recovery0-perplexity" not in drawn
    looks = facts["curve"]["held_out"]
    close(points(drawn["recovery0-loss"], "held-out-rows"), [(look["step"], look["loss"]) for look in looks])
    assert "Perplexity" not in words(text)
    one, other = facts["before"]["squarehead"], facts["after"]["squarehead"]
    assert f"hidden states of held-out rows: {one:.4g} → {other:.4g}, so that {1 - other / one:.1%} of it" in words(
        text
    )


def test_the_chart_of_a_draft_shares_the_drawing() -> None:
    looks = [{"step": step, "acceptance": 0.5 + step / 100, "agreement": None} for step in (0, 5, 10)]
    chart = ElementTree.fromstring(
        training_chart({"held_out": looks, "train": [{"step": 5, "loss": 2.0}]}).replace("xlink:href", "href")
    )
    close(points(chart, "acceptance-when-sampling"), [(0, 50.0), (5, 55.0), (10, 60.0)])
    assert points(chart, "same-token-when-greedy") == []
    assert "acceptance when sampling, in percent, 50 after 0 updates to 60 after 10" in str(chart.get("aria-label"))
