"""Calibration of artifacts: compressed weights as they run, JSON out, bad input refused in a sentence."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from compress.kv_cache import calibrate as module
from compress.kv_cache.calibrate import CalibrationOptions, calibrate
from compress.kv_cache.gates import GateOptions
from runtime.errors import RequestError
from runtime.kv_cache.policy.calibrated import Calibrated
from runtime.kv_cache.policy.policy import Policy

GATES = GateOptions(sinks=2, recent=6, length=64, steps=4, window=2)


@pytest.fixture(scope="module")
def rows() -> torch.Tensor:
    return torch.randint(0, 256, (4, 64), generator=torch.Generator().manual_seed(0))


class _Log:
    def __init__(self) -> None:
        self.lines: list[str] = []

    def phase(self, title: str, total: int) -> None:
        self.lines.append(f"{title} {total}")

    def step(self, note: str) -> None:
        self.lines.append(note)


def test_everything_of_an_artifact(tiny_artifact: Path, rows: torch.Tensor) -> None:
    log = _Log()
    found = calibrate(
        tiny_artifact, {"gates", "channels", "prefix_tokens"}, rows, log, options=CalibrationOptions(GATES)
    )
    assert json.loads(json.dumps(found)) == found
    assert set(found) == {"fingerprint", "seconds", "facts", "gates", "channels", "prefix_tokens"}
    assert torch.tensor(found["gates"]).shape == (2, 2)
    assert torch.tensor(found["channels"]).shape == (2, 2, 4)
    assert set(found["seconds"]) == set(found["facts"]) == {"gates", "channels", "prefix_tokens"}
    assert found["facts"]["prefix_tokens"]["reason"]
    assert "retrieval heads 2" in log.lines
    assert any(line.startswith("step 4: distance") for line in log.lines)
    again = calibrate(tiny_artifact, {"gates", "channels"}, rows, options=CalibrationOptions(GATES))
    assert again["gates"] == found["gates"]
    assert again["channels"] == found["channels"]


def test_only_what_is_needed(tiny_llama: Any, rows: torch.Tensor) -> None:
    for needs in (
        {"channels"},
        ["double-sparsity"],
        Policy.parse("doublesparsity"),
    ):
        found = calibrate(tiny_llama(), needs, rows, options=CalibrationOptions(channels=6))  # type: ignore[arg-type]
        assert set(found) == {"fingerprint", "seconds", "facts", "channels"}
        assert len(found["channels"][0][0]) == 6
    assert set(calibrate(tiny_llama(), set(), rows)) == {"fingerprint", "seconds", "facts"}


def test_a_policy_with_what_was_found_is_complete(tiny_llama: Any, rows: torch.Tensor) -> None:
    policy = Policy.parse(
        {"evict": {"score": "duo", "ratio": 0.5, "sinks": 3, "recent": 9}, "select": "double-sparsity"}
    )
    found = calibrate(tiny_llama(), policy, rows)
    assert found["facts"]["gates"]["window"] == [3, 9]
    assert not policy.with_calibrated(Calibrated.parse(found, ("calibrated",))).missing


def test_calibration_in_bfloat16_finds_about_the_same(
    tiny_artifact: Path, rows: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a GPU computes in, here without one."""
    from compress.kv_cache import calibrate as module

    needs = {"gates", "channels", "prefix_tokens"}
    exact = calibrate(tiny_artifact, needs, rows, options=CalibrationOptions(GATES))
    own, dtypes = module.Blueprint, []

    def blueprint(artifact: Any, device: Any, kernels: str, dtype: Any, trust: bool) -> Any:
        dtypes.append(dtype)
        return own(artifact, device, kernels, torch.bfloat16, trust)

    monkeypatch.setattr(module, "Blueprint", blueprint)
    found = calibrate(tiny_artifact, needs, rows, options=CalibrationOptions(GATES), device="cpu")
    assert dtypes == [torch.float32]
    torch.testing.assert_close(torch.tensor(found["gates"]), torch.tensor(exact["gates"]), atol=0.02, rtol=0)
    pairs = zip(found["facts"]["channels"]["share"], exact["facts"]["channels"]["share"], strict=True)
    assert all(abs(a - b) < 0.02 for a, b in pairs)
    assert found["prefix_tokens"] == exact["prefix_tokens"]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_calibration_on_a_gpu_finds_about_the_same(tiny_artifact: Path, rows: torch.Tensor) -> None:
    model, _ = module.load(tiny_artifact, device="cuda")
    assert {(p.device.type, p.dtype) for p in model.parameters() if p.is_floating_point()} == {("cuda", torch.bfloat16)}
    exact = calibrate(tiny_artifact, {"gates", "channels"}, rows, options=CalibrationOptions(GATES))
    found = calibrate(tiny_artifact, {"gates", "channels"}, rows, options=CalibrationOptions(GATES), device="cuda")
    torch.testing.assert_close(torch.tensor(found["gates"]), torch.tensor(exact["gates"]), atol=0.02, rtol=0)
    assert torch.tensor(found["channels"]).shape == (2, 2, 4)


@pytest.mark.parametrize(
    ("needs", "changed", "sentence"),
    [
        ({"gate"}, {}, "cannot be calibrated for 'gate'"),
        ({"channels"}, {"rows": torch.zeros(2, 4)}, "must be int64"),
        ({"channels"}, {"rows": torch.zeros(1, 129, dtype=torch.int64)}, "more than the 128 positions"),
        ({"channels"}, {"rows": torch.full((1, 8), 257)}, "outside the model's vocabulary"),
        ({"channels"}, {"options": CalibrationOptions(channels=99)}, "channels must be"),
    ],
)
def test_bad_input(tiny_llama: Any, rows: torch.Tensor, needs: Any, changed: dict[str, Any], sentence: str) -> None:
    with pytest.raises(RequestError, match=sentence):
        calibrate(tiny_llama(), needs, **{"rows": rows, **changed})
