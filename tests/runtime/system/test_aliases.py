"""Former module paths that the documentation named."""

from __future__ import annotations

import importlib
import sys

import pytest

import compress  # noqa: F401 (its own aliases)
import runtime  # noqa: F401


@pytest.mark.parametrize(
    ("former", "present"),
    [
        ("runtime.streaming", "runtime.engines.streaming"),
        ("runtime.decoding.drafters", "runtime.drafting.drafters"),
        ("runtime.decoding.drafters.base", "runtime.drafting.drafters.base"),
        ("runtime.decoding.drafters.lookup", "runtime.drafting.drafters.lookup"),
        ("runtime.streaming.engine", "runtime.engines.streaming.engine"),
        ("runtime.artifact", "runtime.checkpoint.artifact"),
        ("runtime.linear", "runtime.layers.compressed_linear"),
        ("runtime.loading", "runtime.api.load"),
        ("runtime.model", "runtime.api.model"),
        ("runtime.native", "runtime.system.native"),
        ("runtime.seq2seq", "runtime.api.seq2seq"),
        ("compress.distill.team", "compress.core.processes"),
    ],
)
def test_a_former_path_is_the_same_module(former: str, present: str) -> None:
    module = importlib.import_module(former)
    assert module is importlib.import_module(present) is sys.modules[former]
    assert module.__name__ == present
    assert module.__spec__ is not None
    assert module.__spec__.name == present


def test_what_was_never_there_is_not_found() -> None:
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("runtime.decoding.drafters.nothing")
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("compress.pipeline")
