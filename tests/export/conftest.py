"""Artifacts for export tests, each made once a session."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from artifact_kinds import K_QUANTS, SIZES, STAGES
from random_models import UNLIMITED

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))  # gpu_launches


@pytest.fixture(scope="session")
def made(
    tiny_llama: Callable[..., Path], tiny_text: Path, tmp_path_factory: pytest.TempPathFactory
) -> Callable[..., Path]:
    """`made("w4_g128")`: directory of that artifact (`dense`: the checkpoint itself). Shared: copy it before you change it."""
    import compress

    done: dict[str, Path] = {}

    def make(kind: str, **changes: object) -> Path:
        key = repr((kind, sorted(changes.items())))
        if key in done:
            return done[key]
        model = tiny_llama(**{**SIZES, **changes})
        stages = {**STAGES, **K_QUANTS}[kind]
        if not stages:
            done[key] = model
            return model
        recipe = {
            "name": kind,
            "model": str(model),
            "stages": stages,
            "calibration": {"data": str(tiny_text), "samples": 4, "sequence_length": 32},
            "evaluate": {
                **UNLIMITED,
                "data": str(tiny_text),
                "sequence_length": 32,
                "samples": 2,
                "max_perplexity_increase": "100000%",
            },
        }
        done[key] = compress.apply(recipe, output=tmp_path_factory.mktemp(kind) / kind, quiet=True).path
        return done[key]

    return make


@pytest.fixture(scope="session")
def few_launches() -> Callable[..., AbstractContextManager[None]]:
    """`with few_launches():` exports to triton compile one launch of each kernel. `count`: only of the first so many kernels; `prefix`:
    instead every launch of kernels with this prefix."""
    from export.triton_aot import plan

    every = plan.launches

    @contextmanager
    def patched(count: int | None = None, prefix: str = "") -> Iterator[None]:
        def few(*arguments: Any) -> plan.Launches:
            found = every(*arguments)
            if prefix:
                return replace(found, variants=[each for each in found.variants if each.kernel.startswith(prefix)])
            return replace(found, variants=list({each.kernel: each for each in found.variants}.values())[:count])

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(plan, "launches", few)
            yield

    return patched
