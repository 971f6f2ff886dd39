"""Attention over compressed pages in Triton: right in its interpreter, and next to no spills when compiled for absent GPUs."""

from __future__ import annotations

import itertools
import os
import subprocess
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import torch
from warm_python import python

pytest.importorskip("triton")
if os.environ.get("TRITON_INTERPRET", "0") not in ("", "0"):
    pytest.skip("kernels are interpreted in this process", allow_module_level=True)

from gpu_launches import build, cache_call, record, resources

from runtime.kv_cache.pages import PAGE
from runtime.kv_cache.storage.base import Codec
from runtime.kv_cache.storage.bitmap import Bitmap
from runtime.kv_cache.storage.fp8 import Float8
from runtime.kv_cache.storage.integer import Integer
from runtime.kv_cache.storage.plain import Plain

HERE = Path(__file__).parent
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
CODECS: dict[str, tuple[Codec, Codec]] = {
    "plain": (Plain(), Plain()), "fp8": (Float8(), Float8()), "bitmap": (Bitmap(), Bitmap()),
    "groups": (Integer(4, "token", 32), Integer(4, "token", 32)),
    **{f"int{bits}": (Integer(bits, "channel"), Integer(bits, "token")) for bits in (8, 4, 2)},
}  # fmt: skip
UNITS = {"all": 0, "pages": PAGE, "tokens": 1}


NEWER = tuple(map(int, version("triton").split(".")[:2])) >= (3, 7)  # whose assemblers spill a little more


@dataclass(frozen=True)
class Case:
    """One launch of the split kernel to compile; every other axis than storage has a default.

    Attributes:
        keys: of CODECS.
        values: likewise.
        size: channels of a key; a value has 80 with 96, else as many.
        held: of a model in float32, what its cache is held in.
        read: of UNITS.
        one_share: of few tokens, so that nothing is merged.
        spills: bytes, where ptxas would rather spill an address than have fewer programs at once.
    """

    keys: str
    values: str
    size: int = 128
    queries: int = 4
    dtype: torch.dtype = BF16
    held: torch.dtype | None = None
    read: str = "all"
    capped: bool = False
    bias: bool = False
    visible: bool = False
    one_share: bool = False
    spills: int = 0

    def axes(self) -> dict[str, Any]:
        """What cases must cover."""
        return {name: value for name, value in vars(self).items() if name != "spills"}

    def launches(self, capability: int) -> list[Any]:
        """Of the split kernel and, unless it has one share, the merging one."""
        sizes = self.size, 80 if self.size == 96 else self.size
        call = cache_call(
            CODECS[self.keys][0], CODECS[self.values][1], sizes, self.queries, self.dtype, self.held,
            64 if self.one_share else 4096, 30.0 if self.capped else 0.0, self.bias, self.visible, UNITS[self.read],
        )  # fmt: skip
        return record(call, capability)


#: sm_90 has every storage of recipes; the others have each codec beside another. Which flags meet is chosen so that between them all
#: pairs of flags and all levels of an axis on each GPU are compiled (`test_cases_cover`), at a tenth of what all combinations take.
CASES = {
    80: (
        Case("plain", "groups", read="pages"),
        Case("fp8", "bitmap", queries=1, bias=True),
        Case("int8", "fp8", queries=64, capped=True, one_share=True),
        Case("int4", "int4", 256, dtype=FP32, read="tokens", visible=True, spills=128),
        Case("int2", "int8", 64, dtype=FP16, read="tokens", capped=True, bias=True, visible=True, one_share=True),
        Case("groups", "plain", 96, dtype=FP32, held=BF16, read="pages", capped=True),
        Case("bitmap", "int2", 64, queries=1, bias=True, visible=True),
    ),
    90: (
        Case("plain", "plain", read="tokens", bias=True, visible=True),
        Case("fp8", "fp8", 64, queries=1, read="pages", bias=True, visible=True, one_share=True),
        Case("int8", "int8", 96, dtype=FP16),
        Case("int4", "int4", 256, dtype=FP32, one_share=True, spills=128),
        Case("int2", "int2", queries=64, dtype=FP32, held=BF16, read="pages", capped=True),
        Case("groups", "groups", 64, capped=True, bias=True, visible=True),
        Case("bitmap", "bitmap", queries=1, read="tokens", capped=True),
    ),
    100: (
        Case("plain", "plain", 64, queries=1, capped=True),
        Case("fp8", "groups", 96, dtype=FP32, held=BF16, read="tokens", capped=True, one_share=True),
        Case("int8", "bitmap", 64, queries=1, dtype=FP16, read="pages", bias=True, visible=True),
        Case(
            "int4",
            "int4",
            256,
            dtype=FP32,
            read="pages",
            capped=True,
            bias=True,
            visible=True,
            spills=160 if NEWER else 128,
        ),
        Case("int2", "int8"),
        Case("groups", "int2", queries=64, read="tokens", bias=True, visible=True, one_share=True),
        Case("bitmap", "fp8", spills=48 if NEWER else 32),
    ),
}
FLAGS = ("queries", "read", "capped", "bias", "visible", "one_share")


@pytest.mark.slow
def test_interpreted_kernels_equal_plain_torch() -> None:
    """Triton decides at import whether it compiles or interprets: a process of its own."""
    command = [python(TRITON_INTERPRET="1"), "-m", "pytest", "-q", "-x", "-p", "no:xdist", "-p", "no:cacheprovider"]
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    environment.pop("PYTEST_XDIST_WORKER", None)
    done = subprocess.run(
        [*command, str(HERE / "interpreted_triton_attention.py")], capture_output=True, text=True, env=environment
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]


def test_cases_cover() -> None:
    assert {(case.keys, case.values) for case in CASES[90]} == {(name, name) for name in CODECS}
    found = {capability: [case.axes() for case in cases] for capability, cases in CASES.items()}
    every = [axes for cases in found.values() for axes in cases]
    levels = {name: {axes[name] for axes in every} for name in every[0]}
    assert levels["size"] == {64, 96, 128, 256}
    assert levels["queries"] == {1, 4, 64}
    assert levels["read"] == set(UNITS)
    assert levels["dtype"] == {BF16, FP16, FP32}
    for capability, cases in found.items():
        for name in levels:
            assert {axes[name] for axes in cases} == levels[name], (capability, name)
    for one, other in itertools.combinations(FLAGS, 2):
        met = {(axes[one], axes[other]) for axes in every}
        assert met == set(itertools.product(levels[one], levels[other])), (one, other)
    for name in ("keys", "values"):
        assert len({(axes[name], axes["read"]) for axes in every}) >= 17, "of 21"


@pytest.mark.sampled(4, 5)
@pytest.mark.parametrize(
    ("capability", "case"),
    [pytest.param(gpu, case, id=f"{gpu}-{case.keys}-{case.values}") for gpu, cases in CASES.items() for case in cases],
)
def test_compiles(capability: int, case: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    launches = case.launches(capability)
    names = [launch.kernel.__name__ for launch in launches]
    assert names == ["split_kernel", "merge_kernel"][: 1 if case.one_share else 2]
    merges = case.values == "plain"  # one on each GPU: it only differs by a value's size and the number of shares
    assert not (merges and case.one_share)
    for launch in launches if merges else launches[:1]:
        found = resources(build(launch, capability), capability)
        assert found["spill_bytes"] <= case.spills, (launch.kernel.name, found)
        assert 16 <= found["registers"] <= 255, (launch.kernel.name, found)
        assert found["shared"] <= 48 << 10, (launch.kernel.name, found)
