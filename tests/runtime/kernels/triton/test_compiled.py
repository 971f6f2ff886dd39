"""Every kernel compiles for sm_80, sm_90 and sm_100 without a GPU, and the hot ones keep to their registers."""

import os

import pytest

pytest.importorskip("triton")
if os.environ.get("TRITON_INTERPRET", "0") not in ("", "0"):
    pytest.skip("kernels are interpreted in this process", allow_module_level=True)

KERNELS = [
    "w4a16 1", "w4a16 16", "w4a16 512", "w4a16 dequantize", "w8a8 int8 512", "w8a8 float8 512", "quantize int8", "2:4 w4 1",
    "2:4 w4 dequantize", "rms_norm", "swiglu",
]  # fmt: skip


@pytest.mark.sampled(6, 9)
@pytest.mark.parametrize("capability", [80, 90, 100])
@pytest.mark.parametrize("name", KERNELS)
def test_compiles_without_spills(name, capability, tmp_path, monkeypatch):
    import gpu_launches

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    call, least = gpu_launches.hot_launches()[name]
    if capability < least:
        pytest.skip("no float8 there")
    found = gpu_launches.report(name, call, capability)
    assert found
    for kernel, used in found.items():
        assert used["spill_bytes"] == 0, (kernel, used)
        assert 16 <= used["registers"] <= 255, (kernel, used)  # far fewer: the compiler found nothing worth computing
        assert used["shared"] <= 163 << 10, (kernel, used)  # what a program may have on sm_80


def test_matvec_reads_sixteen_bytes_a_thread_without_barriers(tmp_path, monkeypatch):
    """What its speed rests on: wide loads of the weight, and nothing in the loop that threads wait for each other in."""
    import gpu_launches

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    launch = gpu_launches.record(gpu_launches.hot_launches()["w4a16 1"][0])[0]
    ptx = gpu_launches.build(launch, 90).asm["ptx"]
    wide = [line for line in ptx.splitlines() if "ld.global" in line and "evict_first" in line and ".v4.b32" in line]
    assert len(wide) == 4
    assert ptx.count("bar.sync") <= 6, "barriers belong to the reduction after the loop"
    assert ".ftz" not in ptx, "codes are subnormal numbers"
