"""Every kernel against its reference, in triton's interpreter.

Triton decides at import whether it compiles or interprets, so each file of `interpreted/` runs in a process of its own.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from fresh_cache import fresh_cache

pytest.importorskip("triton")
HERE = Path(__file__).parent


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    "name",
    [
        "matvec",
        "matmul",
        "w8a8",
        "rounded",
        "block_float",
        "sparse24",
        "fused",
        "linear",
        "order",
        "experts",
        "routing",
    ],
)
def test_interpreted(name, tmp_path):
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:xdist", "-p", "no:cacheprovider"]
    environment = os.environ | {"TRITON_INTERPRET": "1", "COMPRESS_CACHE": str(fresh_cache(tmp_path / "cache"))}
    environment.pop("PYTEST_XDIST_WORKER", None)
    done = subprocess.run(
        [*command, str(HERE / "interpreted" / f"interpreted_{name}.py")],
        capture_output=True,
        text=True,
        env=environment,
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert not list(tmp_path.rglob("*.json")), "nothing is tuned in the interpreter"
