"""Artifacts whose weights are float8 on disk, in the native engine."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from compressed_models import BATCH, compress
from tiny_models import llama

import runtime
from runtime.formats.scheme import GridScheme, Scheme
from runtime.kernels.cpu import library

pytestmark = pytest.mark.skipif(library.load() is None, reason="needs a C compiler: CC, cc, gcc or clang")

SCHEME = Scheme(GridScheme(8, "float", strategy="channel"))


def test_a_float8_artifact_is_loaded_into_the_native_engine(tmp_path: Path) -> None:
    """At first from its own tensors, then from prepared ones: the same numbers, near those of transformers' modules."""
    chosen = ("float-quantized", SCHEME)
    compress(llama(num_hidden_layers=2), tmp_path / "artifact", lambda n: chosen if n.endswith("_proj") else None)
    reference = runtime.load(tmp_path / "artifact", kernels="reference").logits(BATCH).float()
    first, later = (runtime.load(tmp_path / "artifact") for _ in range(2))
    assert type(first.engine).__name__ == type(later.engine).__name__ == "NativeEngine"
    found = first.logits(BATCH)
    assert torch.equal(found, later.logits(BATCH))
    assert (found.float() - reference).norm() < 0.05 * reference.norm()
    tokens = first.generate([5, 6, 7], max_new_tokens=8, ignore_eos=True)
    assert tokens == later.generate([5, 6, 7], max_new_tokens=8, ignore_eos=True)
