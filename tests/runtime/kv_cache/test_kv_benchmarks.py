"""What the benchmarks of caches say, on results of a few cells made by hand: the tables of docs/results rest on these sums."""

from __future__ import annotations

import importlib
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

BENCHMARKS = Path(__file__).parents[3] / "benchmarks"


@pytest.fixture(scope="module")
def benchmarks() -> Iterator[Any]:
    """Imports a module of the folder, which is no package."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(BENCHMARKS))
        yield importlib.import_module


@pytest.fixture(scope="module")
def report(benchmarks: Any) -> Any:
    return benchmarks("kv_report")


def cell(
    tool: str, method: str, budget: float | None, right: list[int], size: float, **more: Any
) -> list[dict[str, Any]]:
    """One for each seed, of 10 questions."""
    of = {"tool": tool, "method": method, "budget": budget, "job": "needle-2048-later", "bytes": size, **more}
    return [{**of, "seed": seed, "correct": correct, "asked": 10} for seed, correct in enumerate(right)]


RESULT = {
    "cells": [
        *cell("compress", "full cache", None, [10, 10], 1.0),
        *cell("kvpress", "full", 1.0, [10, 10], 1.0),
        *cell("compress", "ours", 0.5, [10, 8], 0.5, peers=["theirs", "absent"]),
        *cell("compress", "ours", 0.25, [3, 5], 0.25, peers=["theirs"]),
        *cell("kvpress", "theirs", 0.5, [8, 8], 0.5),
        *cell("kvpress", "theirs", 0.25, [6, 7], 0.25),
        *cell("compress", "ours + int4", 0.25, [10, 10], 0.252),
        *cell("compress", "int4", None, [10, 10], 0.3),
        *cell("compress", "too large", 0.25, [10, 10], 0.26),
        *cell("compress", "reads little", 0.25, [10, 10], 1.0, reads=0.25),
        *cell("compress", "of one seed", 0.5, [10], 0.5),
        {"tool": "compress", "method": "failed", "budget": 0.5, "job": "needle-2048-later", "seed": 0, "error": "no"},
    ]
}  # fmt: skip


def test_points_are_means_of_methods_that_worked_in_all_seeds(report: Any) -> None:
    (panel,) = report.panels(RESULT)
    assert (panel.job, panel.better, panel.decodes) == ("needle-2048-later", True, False)
    found = {(p["tool"], p["method"], p["budget"]): p for p in report.points(RESULT, panel)}
    assert not {method for _, method, _ in found} & {"failed", "of one seed"}
    ours = found["compress", "ours", 0.25]
    assert ours["value"] == pytest.approx(40)
    assert ours["by_seed"] == {0: pytest.approx(30), 1: pytest.approx(50)}
    assert (ours["bytes"], ours["reads"], ours["peers"]) == (0.25, None, ["theirs"])
    assert found["compress", "reads little", 0.25]["reads"] == 0.25


def test_a_perplexity_is_that_of_the_mean_likelihood(report: Any) -> None:
    made = [{"nll": 1.0}, {"nll": 3.0}]
    assert report.number(made, "perplexity") == pytest.approx(math.exp(2))
    unequal = [{"correct": 1, "asked": 1}, {"correct": 0, "asked": 9}]
    assert report.number(unequal, "accuracy") == 50  # every job counts the same


def test_the_best_at_a_budget_takes_no_more_bytes(report: Any) -> None:
    (panel,) = report.panels(RESULT)
    found = report.points(RESULT, panel)
    assert (
        report.best(found, "compress", 0.25, panel)["method"] == "ours + int4"
    )  # 1 % more at most, and a cache that is cut
    assert report.best(found, "kvpress", 0.5, panel)["method"] == "theirs"
    # At equal numbers the smaller; a method of one size counts wherever it fits.
    assert report.best(found, "compress", 0.5, panel)["method"] == "ours + int4"
    assert report.best([p for p in found if "+" not in p["method"]], "compress", 0.5, panel)["method"] == "too large"
    assert report.best(found, "compress", 0.1, panel) is None


def test_the_least_is_the_smallest_as_good_as_a_full_cache(report: Any) -> None:
    (panel,) = report.panels(RESULT)
    found = report.points(RESULT, panel)
    assert report.least(found, "compress", panel)["method"] == "ours + int4"
    assert report.least(found, "kvpress", panel) is None
    assert report.least([p for p in found if p["method"] != "full cache"], "compress", panel) is None


@pytest.mark.parametrize("better", [True, False])
def test_ours_is_behind_where_it_loses_more_than_the_noise(report: Any, better: bool) -> None:
    (panel,) = report.panels(RESULT)
    rows = {row["budget"]: row for row in report.pairs(report.points(RESULT, panel), better)}
    assert {row["peer"] for row in rows.values()} == {"theirs"}
    sign = 1 if better else -1
    # Differences of 20 and 0, and of -30 and -20 percent.
    assert (rows[0.5]["gain"], rows[0.5]["noise"]) == (pytest.approx(sign * 10), pytest.approx(10))
    assert (rows[0.25]["gain"], rows[0.25]["noise"]) == (pytest.approx(sign * -25), pytest.approx(5))
    assert not report.behind(rows[0.5])
    assert report.behind(rows[0.25]) is better
    assert not report.behind({"gain": -0.004, "noise": 0.0})


def test_tables_and_summary_say_these_numbers(report: Any) -> None:
    table = report.text(RESULT)
    assert "ours against theirs at 25 %: -25.00 +- 5.00  <-- BEHIND" in table
    assert "reads little" in table
    summary = report.summary(RESULT)
    assert "100.0 / 80.0" in summary
    assert "behind by more than the noise in 1: ours at 25 %: -25.00 +- 5.00" in summary
    assert "25.2 % (ours + int4)" in summary


def test_every_method_is_a_policy_at_its_budgets_or_says_why_not(benchmarks: Any) -> None:
    methods = benchmarks("kv_methods")
    assert len({method.name for method in methods.METHODS}) == len(methods.METHODS)
    decoded = benchmarks("kv_quality").DECODED[0]
    for method in methods.METHODS:
        planned, reasons = 0, []
        for budget in [None] if method.fixed else methods.BUDGETS:
            tokens = round(budget * decoded) if method.decodes else None
            try:
                policy = method.at(None if method.decodes else budget, None, tokens)
            except ValueError as error:
                reasons.append(str(error))
                continue
            if method.needs:
                with pytest.raises(ValueError, match="calibrat"):
                    policy.plan()
                planned += 1
                continue
            plan = policy.plan()
            planned += 1
            if method.reads:
                assert (plan.selection.ratio, plan.eviction) == (budget, None)
            elif method.decodes:
                assert (plan.eviction.tokens, plan.eviction.interval) == (tokens, 32)
            elif not method.fixed:
                assert (plan.eviction.ratio, plan.eviction.interval) == (budget, None)
            assert plan.storage.tiers or plan.storage.clusters or plan.eviction or plan.selection
        assert planned, method.name
        # A window that is no smaller than the budget.
        assert all("must be" in reason or "keeps" in reason for reason in reasons), reasons
        assert method.decodes or not reasons, method.name


def test_cells_are_sums_over_rows(benchmarks: Any) -> None:
    quality = benchmarks("kv_quality")
    of = {"tool": "compress", "method": "ours", "budget": 0.5, "full_bytes": 100}
    rows = [
        {**of, "job": "needle-64-later-0", "cache_bytes": 20, "correct": 1, "asked": 4, "peers": ["theirs"]},
        {**of, "job": "needle-64-later-0", "cache_bytes": 60, "correct": 3, "asked": 8, "peers": ["theirs"]},
        {**of, "job": "needle-64-later-1", "cache_bytes": 60, "correct": 8, "asked": 8, "peers": ["theirs"]},
        {**of, "job": "text-64-0", "cache_bytes": 50, "nll": 6.0, "tokens": 2, "reads": 0.5},
        {**of, "job": "text-64-0", "cache_bytes": 50, "nll": 2.0, "tokens": 6, "reads": 0.3},
        {**of, "job": "text-64-1", "cache_bytes": 50, "nll": 2.0, "tokens": 6},
        {**of, "job": "text-64-1", "error": "no budget"},
        {**of, "tool": "kvpress", "job": "needle-64-later-0", "cache_bytes": 100, "nominal_bytes": 50, "correct": 0, "asked": 1},
    ]  # fmt: skip
    cells = {(c["tool"], c["job"], c["seed"]): c for c in quality.cells(rows)}
    assert len(cells) == 5
    first = cells["compress", "needle-64-later", 0]
    assert (first["bytes"], first["correct"], first["asked"], first["peers"]) == (0.4, 4, 12, ["theirs"])
    text = cells["compress", "text-64", 0]
    assert (text["nll"], text["reads"], text["bytes"]) == (1.0, 0.4, 0.5)
    assert cells["compress", "text-64", 1]["error"] == "no budget"
    assert "bytes" not in cells["compress", "text-64", 1]
    assert cells["kvpress", "needle-64-later", 0]["bytes"] == 0.5
    assert len({quality.identity(c) for c in cells.values()}) == 5
