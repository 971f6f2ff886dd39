"""The GPU benchmark is imported from `benchmarks`; what its workers compile, all tests share."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from fresh_cache import fresh_cache
from warm_python import python

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))  # gpu, gpu_sections


@pytest.fixture
def warm_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers, whose kernels are interpreted, come from `warm_python`."""
    monkeypatch.setattr(sys, "executable", python(TRITON_INTERPRET="1"))


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache of its own for the workers of a test."""
    path = fresh_cache(tmp_path / "cache")
    monkeypatch.setenv("COMPRESS_CACHE", str(path))
    return path
