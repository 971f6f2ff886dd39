"""`benchmarks/kernels_gpu.py` as far as a machine without a GPU can run it."""

import json
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parents[5] / "benchmarks" / "kernels_gpu.py"


def test_script_checks_every_kernel():
    command = [sys.executable, str(SCRIPT), "--interpret"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads(done.stdout)
    assert result["checks"]["failed"] == []
    assert result["checks"]["passed"] >= 19
    assert result["interpreted"]
    assert {aim["met"] for aim in result["aims"]} == {None}, "nothing is measured in the interpreter"
