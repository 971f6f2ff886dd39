"""Sweeps over a tiny random Llama."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from random_models import UNLIMITED
from sweep_runs import BITS, GROUP, Here

from compress.sweeps.run import SweepResult, sweep


@pytest.fixture
def views() -> None:
    """For tests that look at the plot and the page of the sweep."""


@pytest.fixture(autouse=True)
def no_pages(request, monkeypatch) -> None:
    """Pages take most of the time of so small trials. That of a trial's own artifact is tested elsewhere, the sweep's with `views`."""
    monkeypatch.setattr("compress.report.write_report", lambda artifact: None)
    if "views" not in request.fixturenames:
        monkeypatch.setattr("compress.sweeps.run.write_views", lambda *_: [])


@pytest.fixture
def recipe_file(tiny_llama, tiny_text, tmp_path) -> Path:
    """Rounding to nearest, which takes no calibration."""
    recipe = {
        "name": "tiny", "model": str(tiny_llama()), "stages": [{"quantize": {"method": "rtn", "bits": 4, "group_size": 32}}],
        "evaluate": {**UNLIMITED, "data": str(tiny_text), "sequence_length": 32, "samples": 4},
    }  # fmt: skip
    file = tmp_path / "tiny.yaml"
    file.write_text(yaml.safe_dump(recipe), encoding="utf-8")
    return file


@pytest.fixture
def settings(recipe_file) -> Callable[..., dict[str, Any]]:
    """`settings(**keys)`: a sweep of four points as a dictionary; keys replace its own."""

    def make(**keys: Any) -> dict[str, Any]:
        base = {"name": "tiny", "recipe": str(recipe_file), "vary": {BITS: [3, 8], GROUP: [16, 32]}, "keep": "none"}
        return copy.deepcopy({**base, **keys})

    return make


@pytest.fixture
def run(tmp_path) -> Callable[..., SweepResult]:
    """`run(settings, executor)`: carried out into `tmp_path / "out"`."""

    def call(source: Any, executor: Any = None, **options: Any) -> SweepResult:
        chosen = executor or Here()
        options = {"output": tmp_path / "out", "device": "cpu", "quiet": True, **options}
        return sweep(source, executor=lambda *_: chosen, **options)

    return call
