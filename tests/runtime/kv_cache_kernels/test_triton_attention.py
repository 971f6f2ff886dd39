"""Attention over compressed pages in Triton: right in its interpreter, and next to no spills when compiled for absent GPUs."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")
if os.environ.get("TRITON_INTERPRET", "0") not in ("", "0"):
    pytest.skip("kernels are interpreted in this process", allow_module_level=True)

HERE = Path(__file__).parent
KINDS = [
    "plain", "fp8", "int8", "int4", "int2", "int4 groups", "bitmap", "plain pages", "int4 pages", "fp8 tokens", "int4 tokens",
]  # fmt: skip

#: Bytes, where ptxas would rather spill an address than have fewer programs at once.
SPILLS = {("int4 pages", 64, 90): 16, ("int4 pages", 64, 100): 28, ("fp8 tokens", 64, 100): 16}


@pytest.mark.slow
def test_interpreted_kernels_equal_plain_torch() -> None:
    """Triton decides at import whether it compiles or interprets: a process of its own."""
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:xdist", "-p", "no:cacheprovider"]
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    environment.pop("PYTEST_XDIST_WORKER", None)
    done = subprocess.run(
        [*command, str(HERE / "interpreted_triton_attention.py")], capture_output=True, text=True, env=environment
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]


@pytest.mark.parametrize("capability", [80, 90, 100])
@pytest.mark.parametrize("size", [64, 128])
@pytest.mark.parametrize("kind", KINDS)
def test_compiles(kind: str, size: int, capability: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from runtime.kernels.triton.compiled import build, cache_launches, record, resources

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    launches = record(cache_launches(size)[f"cache {kind}"], capability)
    assert [launch.kernel.__name__ for launch in launches] == ["split_kernel", "merge_kernel"]
    for launch in launches if kind == "plain" else launches[:1]:  # the other only differs by storage
        found = resources(build(launch, capability), capability)
        assert found["spill_bytes"] <= SPILLS.get((kind, size, capability), 0), (launch.kernel.name, found)
        assert 16 <= found["registers"] <= 255, (launch.kernel.name, found)
        assert found["shared"] <= 48 << 10, (launch.kernel.name, found)


@pytest.mark.parametrize("capability", [80, 90, 100])
@pytest.mark.parametrize(
    ("size", "queries", "dtype", "spills"),
    [(128, 64, torch.bfloat16, 0), (256, 64, torch.bfloat16, 0), (128, 8, torch.float32, 0), (256, 8, torch.float32, 128)],
    ids=str,
)  # fmt: skip
def test_compiles_for_many_queries_and_large_heads(
    size: int,
    queries: int,
    dtype: torch.dtype,
    spills: int,
    capability: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from runtime.kernels.triton.compiled import build, cache_launches, record, resources

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    launch = record(cache_launches(size, queries, dtype)["cache int4"], capability)[0]
    found = resources(build(launch, capability), capability)
    assert found["spill_bytes"] <= spills, found
    assert found["shared"] <= 96 << 10, found  # a program's on sm_86 and sm_89
    assert found["registers"] >= 16, found
