"""Tiny artifacts, a cache of one's own, and a bound that leaves room for a number of blocks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from compressed_models import SCHEMES, compress, inside_blocks
from fresh_cache import fresh_cache
from tiny_models import gpt2, llama

import runtime
from runtime.engines import choose
from runtime.engines.streaming import engine as streaming
from runtime.engines.streaming import load as loading
from runtime.engines.streaming.plan import plan
from runtime.formats.input_transform import InputTransform
from runtime.formats.k_quant import KQuant
from runtime.formats.scheme import Scheme

BLOCKS = 5


@pytest.fixture(scope="session")
def artifacts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Llamas (lean engine) in all kinds of formats, some with transformed inputs; a GPT-2 (modules). Read only."""
    home = tmp_path_factory.mktemp("streaming")
    compress(llama(num_hidden_layers=BLOCKS), home / "llama", inside_blocks("pack-quantized"))
    compress(llama(num_hidden_layers=BLOCKS), home / "floats", inside_blocks("nvfp4-pack-quantized"))
    compress(llama(num_hidden_layers=BLOCKS), home / "lossless", inside_blocks("dfloat11"))
    wide, minima = llama(num_hidden_layers=2, hidden_size=256, intermediate_size=256), Scheme(KQuant("Q4_K"))
    compress(wide, home / "k_quants", lambda n: ("k_quant", minima) if n.endswith("_proj") else None)
    small = llama(num_hidden_layers=2)
    compress(small, home / "trellis", inside_blocks("trellis"))
    compress(small, home / "codebooks", inside_blocks("row_codebook"))
    large = llama(
        num_hidden_layers=BLOCKS, hidden_size=256, intermediate_size=256
    )  # in small ones padding is more than weights
    compress(large, home / "ternary", inside_blocks("ternary_dictionary"))
    turned = replace(SCHEMES["pack-quantized"], transform=InputTransform("same"))
    compress(
        llama(num_hidden_layers=BLOCKS),
        home / "turned",
        lambda n: ("pack-quantized", turned) if n.endswith("_proj") else None,
    )
    scheme = ("packed", SCHEMES["packed"])
    compress(gpt2(n_layer=BLOCKS), home / "gpt2", lambda n: scheme if n.rpartition(".")[2].startswith("c_") else None)
    return {path.name: path for path in home.iterdir()}


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache that takes small artifacts too; compiled libraries are those of all tests."""
    monkeypatch.setenv("COMPRESS_CACHE", str(fresh_cache(tmp_path / "cache")))
    monkeypatch.setattr(choose, "SMALLEST", 0)
    return tmp_path / "cache" / "prepared"


@pytest.fixture
def makes(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Files that were made."""
    made: list[Path] = []
    build = loading.build

    def counted(path: Path, *rest: Any, **named: Any) -> None:
        made.append(path)
        build(path, *rest, **named)

    monkeypatch.setattr(loading, "build", counted)
    return made


@pytest.fixture
def load_streamed(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Any]]:
    """`load_streamed(path, slots)`: room for the weights outside the blocks and that many blocks."""
    loaded: list[Any] = []

    def load(path: Path, slots: int, **options: Any) -> Any:
        def roomy(_: int, outside: int, blocks: list[int], reserve: int) -> Any:
            return plan(outside + slots * max(blocks), outside, blocks, reserve=0)

        monkeypatch.setattr(streaming, "plan", roomy)
        model = runtime.load(path, max_memory="1GB", **options)
        loaded.append(model)
        return model

    load.loaded = loaded  # type: ignore[attr-defined]
    yield load
    for model in loaded:
        model.engine.close()
