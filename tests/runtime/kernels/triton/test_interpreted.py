"""Every kernel against its reference, in triton's interpreter.

Triton decides at import whether it compiles or interprets, so the files of `interpreted/` run in processes of their own.
"""

import os
import subprocess
from pathlib import Path

import pytest
from fresh_cache import fresh_cache
from warm_python import python

pytest.importorskip("triton")
HERE = Path(__file__).parent


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    "names",
    ["matvec", "matmul w8a8", "rounded block_float order", "linear", "codebooks", "experts sparse24 fused routing"],
)
def test_interpreted(names, tmp_path):
    command = [python(TRITON_INTERPRET="1"), "-m", "pytest", "-q", "-x", "-p", "no:xdist", "-p", "no:cacheprovider"]
    environment = os.environ | {"TRITON_INTERPRET": "1", "COMPRESS_CACHE": str(fresh_cache(tmp_path / "cache"))}
    environment.pop("PYTEST_XDIST_WORKER", None)
    done = subprocess.run(
        [*command, *(str(HERE / "interpreted" / f"interpreted_{name}.py") for name in names.split())],
        capture_output=True,
        text=True,
        env=environment,
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert not list(tmp_path.rglob("*.json")), "nothing is tuned in the interpreter"
