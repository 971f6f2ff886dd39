"""Choice of the engine: what other packages bring is asked first, and runs exports of its own."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import llama, save, tokenizer

import runtime
from runtime.engines import choose
from runtime.engines.base import EngineOptions
from runtime.engines.choose import EngineMethod
from runtime.engines.torch.engine import TorchEngine
from runtime.errors import RequestError


class Shouting(TorchEngine):
    """An engine of another package."""

    def __init__(self, engine: TorchEngine) -> None:
        super().__init__(engine.module, engine.device)
        self.description = "LOUD"


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    return save(llama(), tmp_path / "model")


def bring(monkeypatch: pytest.MonkeyPatch, method: EngineMethod) -> None:
    monkeypatch.setattr(
        choose, "entries", lambda group: {"loud": lambda: method} if group == "compress.engines" else {}
    )


def test_an_engine_of_another_package_takes_over(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = runtime.load(checkpoint).generate([5, 6, 7], max_new_tokens=5)
    bring(monkeypatch, EngineMethod(Shouting))
    model = runtime.load(checkpoint)
    assert model.stats["engine"] == "LOUD"
    assert model.generate([5, 6, 7], max_new_tokens=5) == expected
    assert runtime.load(checkpoint, kernels="reference").stats["engine"] != "LOUD"
    compressed = runtime.load(checkpoint, kv_cache={"keys": "int8", "values": "int8"})
    assert "LOUD" not in compressed.stats["engine"], "its cache is not compressed"


def test_one_that_does_not_fit_is_passed_over(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for method in (EngineMethod(lambda engine: None), EngineMethod()):
        bring(monkeypatch, method)
        assert "LOUD" not in runtime.load(checkpoint).stats["engine"]


def test_it_runs_exports_of_its_target(checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    export = tmp_path / "export"
    export.mkdir()
    tokenizer().save_pretrained(export)
    manifest = {
        "format": "compress-export",
        "schema_version": 1,
        "target": "loud",
        "files": {},
        "loud": {"model": str(checkpoint)},
    }
    (export / "export.json").write_text(json.dumps(manifest))
    with pytest.raises(RequestError, match="loud"):
        runtime.load(export)

    def load(found: Any, device: torch.device, options: EngineOptions) -> Any:
        assert options.threads is None
        return Shouting(runtime.load(found.facts["model"], device=device).engine)

    bring(monkeypatch, EngineMethod(load_export=load))
    model = runtime.load(export)
    assert model.stats["engine"] == "LOUD"
    assert model.generate([5, 6], max_new_tokens=3) == runtime.load(checkpoint).generate([5, 6], max_new_tokens=3)
