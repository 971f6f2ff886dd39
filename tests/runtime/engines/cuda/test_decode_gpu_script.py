"""The benchmark of decoding on GPUs runs from end to end on a machine without one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from fresh_cache import fresh_cache

SCRIPT = Path(__file__).resolve().parents[4] / "benchmarks" / "decode_gpu.py"


@pytest.mark.slow
def test_tiny(tmp_path: Path) -> None:
    output = tmp_path / "decode.json"
    command = [sys.executable, str(SCRIPT), "--tiny", "--device", "cpu", "--batches", "1", "3", "--output", str(output)]
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "COMPRESS_CACHE": str(fresh_cache(tmp_path / "cache"))}
    done = subprocess.run([*command, "--steps", "6"], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(output.read_text())
    assert json.loads(done.stdout) == found
    rows = {(row["engine"], row["batch"]): row for row in found["rows"]}
    assert len(rows) == 2 * 2 + 2 * 2 * 2
    assert not [row for row in found["rows"] if "error" in row]
    ours = rows["ours w4, graphs", 3]
    assert ours["tokens_per_second"] == pytest.approx(3e3 / ours["step_ms"], rel=0.01)
    assert ours["share_of_bound"] == pytest.approx(ours["bound_ms"] / ours["step_ms"], abs=1e-3)
    assert 0 < rows["ours w4, graphs", 1]["bytes"] < rows["ours bf16, graphs", 1]["bytes"]
    assert 0 < found["check_w4"]["logits"] < 0.05
    assert found["check_w4"]["graphs_differ"] == 0
    assert found["machine"]["torch"]


@pytest.mark.slow
def test_a_whole_model_is_refused_on_a_cpu() -> None:
    done = subprocess.run([sys.executable, str(SCRIPT), "--device", "cpu"], capture_output=True, text=True)
    assert done.returncode == 1
    assert "--tiny" in done.stderr
