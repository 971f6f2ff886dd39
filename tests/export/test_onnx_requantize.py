"""Weights that ONNX cannot say: rounded anew, announced before, and proven against the artifact with the same change made.

And what is not announced: products of integers, which read the artifact's own codes and scales.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from onnx_layer import write_layer
from random_models import UNLIMITED

import compress
import export
from export.onnx_graph.dialect import dialect, layer_rules, multiplies_integers
from export.onnx_graph.grid import ONNX, fit, grid_bytes, to_grid
from runtime.errors import CompressError, RequestError
from runtime.formats.scheme import ActivationScheme, CompressedWeight, GridScheme, Scheme

onnx = pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")


@pytest.fixture(scope="session")
def odd(made: Callable[..., Path], tiny_text: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An artifact with groups of 24, which no block of ONNX Runtime's is a part of."""
    recipe = {
        "name": "w4_g24",
        "model": str(made("dense", hidden_size=240, intermediate_size=480)),
        "stages": [{"quantize": {"method": "rtn", "scheme": "W4A16", "group_size": 24}}],
        "calibration": {"data": str(tiny_text), "samples": 4, "sequence_length": 32},
        "evaluate": {
            **UNLIMITED,
            "data": str(tiny_text),
            "sequence_length": 32,
            "samples": 2,
            "max_perplexity_increase": "100000%",
        },
    }
    return compress.apply(recipe, output=tmp_path_factory.mktemp("odd") / "w4_g24", quiet=True).path


@pytest.mark.slow
@pytest.mark.parametrize("ort", [False, True])
def test_groups_that_no_block_divides_are_rounded_anew(odd: Path, tmp_path: Path, ort: bool) -> None:
    with pytest.raises(RequestError, match=r"\b24\b.*16 or 32 or 64"):
        export.export(odd, "onnx", tmp_path / "refused", quiet=True, ort=ort)

    result = export.export(odd, "onnx", tmp_path / "out", quiet=True, requantize=True, ort=ort)
    assert len(result.losses) == 14
    assert all(0 < loss < 0.2 for loss in result.losses.values())
    assert result.verification is not None
    metrics = result.verification.metrics
    assert metrics["kl"] < 1e-5  # beside the artifact with the same layers rounded
    assert metrics["same_tokens"] == metrics["tokens"] == 128
    assert metrics["kl_of_change"] > 10 * metrics["kl"]
    assert 0.9 < metrics["size"] < 1.05
    announced = [c for c in result.conversions if "rounded anew" in c.what]
    assert [len(c.modules) for c in announced] == [14]
    assert not announced[0].exact
    assert "groups of 24" in announced[0].what
    assert "int4 codes with blocks of 32" in announced[0].what


@pytest.mark.slow
def test_another_rounding_than_the_writer_s_is_refused(
    odd: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import export.onnx_graph.linear as linear

    def coarser(weight: CompressedWeight, *rest: Any) -> Any:
        grid = to_grid(weight, *rest)
        return dataclasses.replace(grid, scale=grid.scale * 1.1)

    monkeypatch.setattr(linear, "to_grid", coarser)
    with pytest.raises(CompressError):
        export.export(odd, "onnx", tmp_path / "out", quiet=True, requantize=True)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("ort", [False, True])
@pytest.mark.parametrize(("kind", "static"), [("w8a8", False), ("w8a8_static", True)])
def test_products_of_integers_announce_no_blocks(
    made: Callable[..., Path], tmp_path: Path, kind: str, static: bool, ort: bool
) -> None:
    result = export.export(made(kind), "onnx", tmp_path / "out", quiet=True, ort=ort)
    said = [conversion.what for conversion in result.conversions]
    assert not [what for what in said if "blocks" in what]
    assert bool([what for what in said if "Q/DQ" in what]) == (static and not ort)
    assert result.verification is not None
    assert 0.95 < result.verification.metrics["size"] < 1.05
    assert result.losses == {}


SPOKEN = {name: dialect(name, torch.float32) for name in ("onnx", "ort")}
WEIGHTS = [
    GridScheme(bits, "int", symmetric, strategy, 64 if strategy == "group" else None)
    for bits in (4, 8)
    for symmetric in (True, False)
    for strategy in ("channel", "tensor", "group")
]
INPUTS = [
    ActivationScheme(8, "int", symmetric, dynamic, strategy)
    for symmetric in (True, False)
    for dynamic, strategy in ((True, "token"), (True, "tensor"), (False, "tensor"))
]


@pytest.mark.parametrize("name", SPOKEN)
@pytest.mark.parametrize("inputs", [None, *INPUTS], ids=str)
@pytest.mark.parametrize("weights", WEIGHTS, ids=str)
def test_what_is_announced_is_what_is_written(
    tmp_path: Path, weights: GridScheme, inputs: ActivationScheme | None, name: str
) -> None:
    """Blocks are said if and only if the scales in the graph have them."""
    rows, columns = 48, 256
    groups = weights.groups(columns)
    shape = (1,) if weights.strategy == "tensor" else (rows, groups)
    values = torch.randint(-8, 8, (rows, columns)).to(torch.int8)
    zero = None if weights.symmetric else torch.ones(shape, dtype=torch.int8)
    scheme = Scheme(weights, inputs)
    weight = CompressedWeight(values, torch.full(shape, 0.5), zero, None, scheme, torch.float32)
    spoken = SPOKEN[name]
    scale = next(
        value
        for value in onnx.load(str(write_layer(tmp_path, weight, spoken))).graph.initializer
        if value.name == "layer.weight_scale"
    )
    said = fit(weights, (rows, columns), layer_rules(scheme, spoken)).what
    if weights.strategy == "group":
        assert said is None
    else:
        assert (said is not None and "blocks" in said) == (len(scale.dims) == 2)
    if multiplies_integers(scheme):
        assert said is None
        assert list(scale.dims) in ([rows], [1], [])


@pytest.mark.parametrize(
    ("weights", "columns", "words", "block"),
    [
        (GridScheme(4, "int", True, "group", 24), 120, "int4 codes with blocks of 32", 32),
        (GridScheme(8, "int", False, "group", 48), 144, "int8 codes with blocks of 48", None),
        (GridScheme(3, "int", True, "group", 200), 400, "int4 codes with blocks of 256", 256),
    ],
)
def test_bytes_of_what_is_rounded_anew(weights: GridScheme, columns: int, words: str, block: int | None) -> None:
    shape = (40, columns)
    said = fit(weights, shape, ONNX)
    assert said.exact == (block is None)
    if block is None:  # three blocks of 16: nothing is rounded
        return
    assert words in str(said.what)
    values = torch.randint(-2, 3, shape).to(torch.int8)
    weight = CompressedWeight(
        values, torch.rand(40, weights.groups(columns)) + 0.1, None, None, Scheme(weights), torch.float32
    )
    grid = to_grid(weight, ONNX, True, "layer")
    assert grid.block == block
    padded = -(-columns // block) * block
    assert grid_bytes(weights, shape, ONNX, 2) == 40 * padded // 2 + grid.scale.numel() * 2
