"""Every kernel compiles for sm_80, sm_90 and sm_100 without a GPU, and the hot ones keep to their registers."""

import os
import re
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")
if os.environ.get("TRITON_INTERPRET", "0") not in ("", "0"):
    pytest.skip("kernels are interpreted in this process", allow_module_level=True)

KERNELS = [
    "w4a16 1", "w4a16 16", "w4a16 64", "w4a16 512", "w4a16 float16 16", "w4a16 float16 512", "mxfp4 float16 16", "w8a16 512",
    "w4a16 dequantize", "w8a8 int8 512", "w8a8 float8 512", "quantize int8", "2:4 w4 1",
    "w4 rounded 1", "w4 rounded 512", "w4 rounded, groups 16", "w4 rounded, groups 4096", "quantize groups", "w4 float8 16",
    "w4 float8 512", "float8 blocks 16", "float8 blocks 512", "mxfp4 1", "mxfp4 16", "mxfp4 512", "nvfp4 1", "nvfp4 16", "nvfp4 512",
    "nvfp4 dequantize", "mxfp8 1", "mxfp8 16", "mxfp8 512", "round NVFP4", "round MXFP4", "round MXFP8",
    "quantize NVFP4", "quantize MXFP8", "NVFP4 512", "MXFP4 65", "MXFP4 4096", "MXFP8 512",
    "2:4 w4 dequantize", "rms_norm", "swiglu", "experts w4 1", "experts w4 16", "experts w4 2048", "experts bf16 512",
    "experts bf16 2048", "experts fp32", "codebook 1", "codebook 16", "codebook 512", "codebook dequantize", "q4_k 1", "q4_k 16",
    "q4_k 512", "q4_k dequantize", "q6_k 1", "q6_k 16", "q6_k 512", "iq4_xs 1", "iq4_xs 16", "iq4_xs 512", "outliers 1", "outliers 16",
]  # fmt: skip


@pytest.mark.sampled(6, 9)
@pytest.mark.parametrize("capability", [80, 90, 100])
@pytest.mark.parametrize("name", KERNELS)
def test_compiles_without_spills(name, capability, tmp_path, monkeypatch):
    import gpu_launches

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    call, least = gpu_launches.hot_launches()[name]
    if capability < least:
        pytest.skip(f"needs a target from sm_{least} on, which has instructions for it")
    found = gpu_launches.report(name, call, capability)
    assert found
    for kernel, used in found.items():
        assert used["spill_bytes"] == 0, (kernel, used)
        assert 16 <= used["registers"] <= 255, (kernel, used)  # far fewer: the compiler found nothing worth computing
        assert used["shared"] <= 163 << 10, (kernel, used)  # what a program may have on sm_80


@pytest.mark.parametrize(
    ("name", "capability", "most"),
    [
        ("w4a16 16", 90, 2.8), ("w4a16 64", 90, 4.4), ("w4a16 512", 90, 4.6), ("w4a16 asymmetric 16", 90, 3.0),
        ("experts w4 2048", 90, 4.6), ("mxfp4 16", 90, 6.4), ("nvfp4 512", 90, 9.0), ("w4a16 16", 80, 3.3), ("w4a16 16", 100, 3.0),
        ("w4a16 512", 100, 3.7), ("w8a16 512", 90, 6.8), ("w4a16 64", 80, 8.0), ("w4a16 float16 16", 90, 2.9),
        ("codebook 16", 90, 5.0), ("iq4_xs 16", 90, 10.8), ("q4_k 16", 90, 10.2), ("q6_k 16", 90, 13.2), ("codebook 512", 90, 5.1),
        ("q4_k 512", 90, 10.0), ("codebook 16", 80, 5.9), ("codebook 16", 100, 5.6),
    ],
)  # fmt: skip
@pytest.mark.sampled(3, 7)
def test_the_loop_of_a_product_is_short(name, capability, most, tmp_path, monkeypatch):
    """In instructions a weight; on Hopper products stay under way while the next weights are dequantized, out of registers."""
    import gpu_launches

    from export.triton_aot.worker import remarks

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    launches = gpu_launches.record(gpu_launches.hot_launches()[name][0], capability)
    launch = next(one for one in launches if one.kernel.__name__ in ("matmul_kernel", "experts_kernel"))
    kernel = gpu_launches.build(launch, capability)
    assert gpu_launches.instructions_a_weight(launch, kernel) <= most
    names = [each.partition(".")[0] for each in gpu_launches.main_loop(kernel)]
    assert names.count("LDGSTS") >= 3, "codes and activations are copied ahead"
    if name.startswith("w4a16") and (name, capability) != ("w4a16 64", 80):  # there two warps dequantize the same
        weights = launch.arguments["BLOCK_N"] * 128 / (kernel.metadata.num_warps * 32)
        dequantized = sum(names.count(each) for each in ("LOP3", "SHF", "PRMT"))
        assert dequantized <= 1.25 * weights, "pairs are dequantized together"
    if capability == 90:
        assert names.count("HGMMA") >= 4
        assert "C7515" not in remarks(kernel, capability), "ptxas waits for each product"
        assert names.count("STS") <= 2, "dequantized weights go through shared memory"
        assert names.count("BAR") <= 4


SASS = """
        /*0000*/                   MOV R1, c[0x0][0x28] ;
.L_x_1:
        /*0010*/                   LDG.E.U8 R2, [R4.64] ;
.L_x_2:
        /*0020*/                   HGMMA.64x16x16.F32.BF16 R24, R8, gdesc[UR4], R24 ;
        /*0030*/              @!P0 IADD3 R3, R3, 0x1, RZ ;
        /*0040*/               @P1 BRA `(.L_x_2) ;
        /*0050*/              @UP1 UIADD3 UR4, UR4, 0x1, URZ ;
        /*0060*/               @P2 BRA `(.L_x_1) ;
.L_x_3:
        /*0070*/                   BRA `(.L_x_3) ;
"""


def test_the_longest_loop_is_read_from_sass():
    import gpu_launches

    assert gpu_launches.longest_loop(SASS) == ["HGMMA.64x16x16.F32.BF16", "IADD3", "BRA"]
    with pytest.raises(ValueError, match="empty"):
        gpu_launches.longest_loop(SASS.partition(".L_x_1")[0])


def test_an_estimate_is_the_longest_of_three():
    import gpu_estimate
    import gpu_launches

    gpu = gpu_estimate.GPUS[1]
    few, many = (
        gpu_launches.record(gpu_launches.hot_launches()[f"w4a16 {rows}"][0], gpu.capability)[0] for rows in (16, 512)
    )
    of_few, of_many = gpu_estimate.estimate(gpu, few, 2.7, 16), gpu_estimate.estimate(gpu, many, 4.1, 512)
    weight = 4096 * 4096 / 2 * (1 + 4 / 128)  # codes, and two bytes a scale of 128
    assert weight / gpu.bandwidth * 1e6 < of_few["memory_us"] < 2 * weight / gpu.bandwidth * 1e6
    assert of_few["bound_by"] == "memory"
    assert of_many["tensor_cores_us"] == pytest.approx(2 * 512 * 4096**2 / gpu.flops * 1e6, abs=0.01)
    assert of_many["bound_by"] == "tensor_cores"
    assert gpu_estimate.estimate(gpu, few, 27.0, 16)["bound_by"] == "instructions"


def narrow(columns, sparse):
    """A matrix-vector product with a weight of odd sizes `[4093, columns]`, on meta."""
    from runtime.kernels.triton import layout, matvec, sparse24_w4

    def meta(*shape, dtype=torch.bfloat16):
        return torch.empty(*shape, dtype=dtype, device="meta")

    tile, rows = 256 if sparse else 128, 4093
    tiles, scale = -(-columns // tile), meta(1, rows)
    words, x = meta(tiles, rows, layout.WIDTH, dtype=torch.int32), meta(1, columns)
    if sparse:
        positions = meta(tiles, -(-rows // 2), layout.WIDTH, dtype=torch.int32)
        weight = sparse24_w4.Sparse24Weight(words, scale, None, (rows, columns), 0, 4, positions=positions)
        return lambda: sparse24_w4.linear(x, weight)
    return lambda: matvec.matvec(x, layout.Weight(words, scale, None, (rows, columns), 0, 4))


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("MXFP4 512", "mxf4"),
        ("NVFP4 512", "mxf4nvf4"),
        ("MXFP8 512", "mxf8f6f4"),
    ],
)
@pytest.mark.parametrize("choice", range(4))
@pytest.mark.sampled(3, 4)
def test_tensor_cores_multiply_block_floats_under_their_scales(name, kind, choice, tmp_path, monkeypatch):
    """In each launch that tuning may choose: with narrower blocks the compiler converts to bfloat16 without a word."""
    import gpu_launches

    from runtime.kernels.triton import block_float

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    every = block_float.configurations
    monkeypatch.setattr(block_float, "configurations", lambda rows, weight: every(rows, weight)[choice:])
    launches = gpu_launches.record(gpu_launches.hot_launches()[name][0], 100)
    (launch,) = [each for each in launches if each.kernel.__name__ == "block_float_kernel"]
    found = re.findall(r"(?:tcgen05\.mma|mma\.sync)\S*", gpu_launches.build(launch, 100).asm["ptx"])
    assert found
    assert all(f"kind::{kind}.block_scale" in each for each in found)


@pytest.mark.sampled(17, 6)
@pytest.mark.parametrize("capability", [80, 90, 100])
@pytest.mark.parametrize(
    ("name", "loads"),
    [
        ("w4a16 1", 4),
        ("nvfp4 1", 4),
        ("2:4 w4 1", 6),
        ("codebook 1", 4),
        ("q4_k 1", 4),
        ("iq4_xs 1", 4),
        ("q6_k 1", 4),
        ("odd", 4),
        ("ragged", 4),
        ("2:4 odd", 6),
        ("2:4 ragged", 6),
    ],
)
def test_matvec_reads_sixteen_bytes_a_thread_without_barriers(name, loads, capability, tmp_path, monkeypatch):
    """What its speed rests on: wide loads of the weight, and nothing in the loop that threads wait for each other in."""
    import gpu_launches

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    sparse = name.startswith("2:4")
    call = gpu_launches.hot_launches().get(name, [narrow(8192 if "odd" in name else 8020, sparse)])[0]
    launch = gpu_launches.record(call, capability)[0]
    assert launch.arguments["EVEN_K"] == ("ragged" not in name)
    ptx = gpu_launches.build(launch, capability).asm["ptx"]
    weight = [line for line in ptx.splitlines() if "ld.global" in line and "evict_first" in line]
    assert len(weight) == loads
    assert all(".v4.b32" in line for line in weight)
    assert ptx.count("bar.sync") <= 6, "barriers belong to the reduction after the loop"
    assert ".ftz" not in ptx, "codes are subnormal numbers"


def test_the_compiler_is_told_nothing_that_it_cannot_see():
    """Hints about values (contiguity, divisibility, constancy) are taken without a check; a false one makes wrong addresses."""
    import runtime

    files = list(Path(runtime.__file__).parent.rglob("*.py"))
    kernels = [file for file in files if "tl.load(" in file.read_text()]
    assert len(kernels) >= 10
    for file in kernels:
        assert not re.search(r"tl\.(max_contiguous|max_constancy|multiple_of|assume)\b", file.read_text()), file
