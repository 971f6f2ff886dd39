"""What the proof of a bundle notices: wrong numbers in every type, wrong numbers behind a change, graphs that nobody runs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from fake_tensorrt.install import install

import export
from export.onnx_graph.change import Expected
from export.tensorrt import bundle
from export.tensorrt.bundle import BestProbe, load_expected, save_expected
from export.verify import Probe, compare_logits, compare_tokens
from runtime.errors import ArtifactError, CompressError, RequestError

pytest.importorskip("onnx")
pytest.importorskip("onnxscript")
onnxruntime = pytest.importorskip("onnxruntime")

Made = Callable[..., Path]


@pytest.fixture
def wrong_scales(monkeypatch: pytest.MonkeyPatch) -> None:
    """Eight scales of one layer come out doubled."""
    from export.onnx_graph import linear

    original = linear.to_grid

    def wrong(weight: Any, rules: Any, requantize: bool, where: str) -> Any:
        grid = original(weight, rules, requantize, where)
        if where.endswith("layers.1.mlp.down_proj"):
            grid.scale[..., :8] *= 2
        return grid

    monkeypatch.setattr(linear, "to_grid", wrong)


# ---------------------------------------------------------------- numbers
@pytest.mark.sampled(2)
@pytest.mark.usefixtures("wrong_scales")
@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("w4_g128_positive", {}),  # bfloat16, which ONNX Runtime cannot run
        ("w4_g128_positive", {"dtype": "float16"}),
        ("w8a8_positive", {}),  # inputs are no longer rounded
        ("w4_g128", {"requantize": True}),  # rounded anew
    ],
)
def test_a_wrong_scale_is_noticed(made: Made, tmp_path: Path, kind: str, options: dict[str, Any]) -> None:
    with pytest.raises(CompressError, match=r"\bKL\b"):
        export.export(made(kind), "tensorrt", tmp_path / "out", quiet=True, **options)
    assert list(tmp_path.iterdir()) == []


def test_a_wrong_bfloat16_constant_is_noticed(made: Made, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The twin has the bundle's own constants, not the artifact's."""
    from export.tensorrt import proof

    original = proof.write_twin

    def damaged(path: Path, folder: Path) -> Path:
        data = path.with_name("model.onnx.data")
        content = bytearray(data.read_bytes())
        content[1:4096:2] = b"\x3f" * len(content[1:4096:2])
        data.write_bytes(content)
        return original(path, folder)

    monkeypatch.setattr(proof, "write_twin", damaged)
    with pytest.raises(CompressError, match=r"\bKL\b"):
        export.export(made("dense"), "tensorrt", tmp_path / "out", quiet=True)


def test_what_a_change_costs_is_said(made: Made, tmp_path: Path) -> None:
    result = export.export(made("w4_g32_asymmetric"), "tensorrt", tmp_path / "out", quiet=True, requantize=True)
    assert result.verification is not None
    found = result.verification.metrics
    assert found["kl"] < 1e-6 < 1e-2 < found["kl_of_change"]
    assert found["top1_agreement"] == 1.0 > found["top1_agreement_of_change"]
    assert found["same_tokens"] == 128
    assert any("rounded anew" in c.what for c in result.conversions)
    assert "kl_of_change" in result.verification.checked


# ---------------------------------------------------------------- ONNX Runtime's errors
def _failing(monkeypatch: pytest.MonkeyPatch, error: Exception, times: int = 9) -> None:
    real, left = onnxruntime.InferenceSession, [times]

    def session(*args: Any, **keywords: Any) -> Any:
        left[0] -= 1
        if left[0] >= 0:
            raise error
        return real(*args, **keywords)

    monkeypatch.setattr(onnxruntime, "InferenceSession", session)


def test_only_a_missing_kernel_excuses_from_comparing(
    made: Made, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from onnxruntime.capi.onnxruntime_pybind11_state import InvalidGraph
    from onnxruntime.capi.onnxruntime_pybind11_state import NotImplemented as NoKernel

    _failing(monkeypatch, NoKernel("no such kernel"))
    result = export.export(made("dense"), "tensorrt", tmp_path / "out", quiet=True, dtype="float32")
    assert result.verification is not None
    assert "kl" not in result.verification.metrics
    assert any("no such kernel" in note for note in result.verification.notes)
    for error in (InvalidGraph("a wrong graph"), RuntimeError("out of memory")):
        _failing(monkeypatch, error)
        with pytest.raises(CompressError, match=rf"model\.onnx: {error}"):
            export.export(made("dense"), "tensorrt", tmp_path / "other", quiet=True, dtype="float32")


def test_float16_without_a_kernel_is_compared_in_float32(
    made: Made, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from onnxruntime.capi.onnxruntime_pybind11_state import NotImplemented as NoKernel

    _failing(monkeypatch, NoKernel("no such kernel"), times=1)
    found = export.export(made("dense"), "tensorrt", tmp_path / "out", quiet=True, dtype="float16").verification
    assert found is not None
    assert "float32 twin" in found.loader
    assert found.metrics["kl"] < 1e-5
    assert any("in float32, not in float16: no such kernel" in note for note in found.notes)


def test_without_onnx_runtime_there_is_no_proof(made: Made, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from export.tensorrt import proof

    monkeypatch.setattr(proof, "missing_packages", list)
    with pytest.raises(RequestError, match=r"onnxruntime.*--no-verify"):
        export.export(made("dense"), "tensorrt", tmp_path / "out", quiet=True)
    export.export(made("dense"), "tensorrt", tmp_path / "out", quiet=True, verify=False)


# ---------------------------------------------------------------- rules
@pytest.mark.parametrize("engine", [False, True])
def test_rules_hold_without_a_proof_too(
    made: Made, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, engine: bool
) -> None:
    """Where the ONNX file is written: with --no-verify, and where an engine is built of it at once."""
    if engine:
        install(monkeypatch)
    from export.tensorrt import rules

    monkeypatch.setattr(rules, "HEAD", 8)
    with pytest.raises(CompressError, match=r"model\.onnx: .*\b32\b.*attention-shape"):
        export.export(made("dense"), "tensorrt", tmp_path / "out", quiet=True, verify=False)
    assert list(tmp_path.iterdir()) == []


# ---------------------------------------------------------------- what a bundle keeps
def _probe(vocabulary: int = 300) -> Probe:
    generator = torch.Generator().manual_seed(0)
    rows = torch.randint(0, vocabulary, (2, 6), generator=generator)
    logits = torch.randn(2, 6, vocabulary, generator=generator) * 3
    logits[:, 2:5].scatter_(-1, rows[:, 3:, None], 12.0)  # what is written is what is most likely
    return Probe([row[:3].tolist() for row in rows], rows, logits, [row[3:].tolist() for row in rows])


@pytest.mark.parametrize("best", [8, 300])
def test_kl_of_kept_logits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, best: int) -> None:
    """Over the best and "any other" it is never above the whole one, and equal where all are kept."""
    monkeypatch.setattr(bundle, "BEST", best)
    probe = _probe()
    save_expected(Expected(probe, {"kl_of_change": 0.25}), tmp_path)
    loaded = load_expected(tmp_path)
    assert loaded is not None
    assert loaded.change == {"kl_of_change": 0.25}
    assert isinstance(loaded.probe, BestProbe)
    assert (loaded.probe.prompts, loaded.probe.continuations) == (probe.prompts, probe.continuations)
    other = probe.logits + torch.randn(probe.logits.shape, generator=torch.Generator().manual_seed(1)) * 0.3
    whole = compare_logits(probe, lambda rows: other, 1.0)["kl"]
    found = compare_logits(loaded.probe, lambda rows: other, 1.0)["kl"]
    assert 0.2 * whole < found <= whole * 1.0001
    if best == 300:
        assert found == pytest.approx(whole, rel=1e-3)
    assert compare_logits(loaded.probe, lambda rows: probe.logits, 1e-6)["logit_difference"] == 0
    with pytest.raises(CompressError, match=r"\bKL\b"):
        compare_logits(loaded.probe, lambda rows: other, found / 2)


def test_mass_outside_the_kept_logits_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The best logits are right to the bit, and the engine believes in another token all the same."""
    monkeypatch.setattr(bundle, "BEST", 8)
    probe = _probe()
    save_expected(Expected(probe), tmp_path)
    loaded = load_expected(tmp_path)
    assert loaded is not None
    assert isinstance(loaded.probe, BestProbe)
    other = probe.logits.clone()
    other.scatter_(-1, probe.logits.argmin(-1, keepdim=True), 30.0)
    with pytest.raises(CompressError, match=r"\bKL\b"):
        compare_logits(loaded.probe, lambda rows: other, 0.05)


def test_a_token_that_was_not_kept_is_no_near_tie(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bundle, "BEST", 8)
    probe = _probe()
    unlikely = int(probe.logits[0, 2].argmin())
    save_expected(Expected(probe), tmp_path)
    loaded = load_expected(tmp_path)
    assert loaded is not None
    wrong = [[unlikely, *probe.continuations[0][1:]], probe.continuations[1]]
    with pytest.raises(CompressError, match="prompt 0"):
        compare_tokens(loaded.probe, lambda prompts, count: wrong, 1.0)


def test_a_damaged_probe_is_refused(tmp_path: Path) -> None:
    assert load_expected(tmp_path) is None
    probe = _probe()
    save_expected(Expected(replace(probe)), tmp_path)
    file = tmp_path / "probe.safetensors"
    file.write_bytes(file.read_bytes()[:-9])
    with pytest.raises(ArtifactError, match=r"probe\.safetensors"):
        load_expected(tmp_path)
