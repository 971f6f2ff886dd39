"""Rounding of inputs: what the compressed-tensors package makes of the same numbers, by the same configuration."""

from __future__ import annotations

import pytest
import torch
from compressed_tensors.quantization import QuantizationArgs
from compressed_tensors.quantization.lifecycle.forward import fake_quantize as their_fake_quantize
from compressed_tensors.quantization.utils import compute_dynamic_scales_and_zp, generate_gparam

from runtime.formats.activation_scheme import ActivationScheme
from runtime.kernels.activations import dynamic_grid, fake_quantize

SCHEMES = {
    "token int8": ActivationScheme(8),
    "token int4": ActivationScheme(4),
    "token int8 asymmetric": ActivationScheme(8, symmetric=False),
    "group int8": ActivationScheme(8, strategy="group", group_size=64),
    "token fp8": ActivationScheme(8, "float"),
    "tensor fp8": ActivationScheme(8, "float", strategy="tensor"),
    "group fp8": ActivationScheme(8, "float", strategy="group", group_size=128),
    "mxfp8": ActivationScheme(8, "float", strategy="group", group_size=32, scales="e8m0"),
    "mxfp4": ActivationScheme(4, "float", strategy="group", group_size=32, scales="e8m0"),
    "nvfp4": ActivationScheme(4, "float", True, "local", "tensor_group", 16, "e4m3"),
}


def inputs(dtype: torch.dtype) -> torch.Tensor:
    """`[2, 48, 256]`: rows of very different size, ties, zeros, one outlier, single signs; all normal numbers of the dtype."""
    x = torch.randn(2, 48, 256) * torch.logspace(-3, 3, 48)[:, None]
    x[0, 0] = 0
    x[0, 1, :64] = 0
    x[0, 2, 5] = 1e4
    x[0, 3] = torch.arange(256) / 8 - 16  # halves between codes
    x[0, 4] = x[0, 4].abs()
    x[0, 5] = -x[0, 5].abs()
    x[0, 6, 1:] = 0
    x[1, :40] = torch.randn(40, 256).clamp(-1.7499, 1.7499) * 2.0 ** torch.arange(-12, 8).repeat(2)[:, None]
    x[1, 40] = 1.75  # where the exponent of a group goes up
    if dtype != torch.float16:
        x[1, 41] *= 1e-30
        x[1, 42] *= 1e30
        x[1, 43] = torch.randn(256) * 2.0**-124
    return x.to(dtype)


def theirs(x: torch.Tensor, scheme: ActivationScheme, global_scale: torch.Tensor | None) -> torch.Tensor:
    arguments = QuantizationArgs(**scheme.to_config())
    scale, zero = compute_dynamic_scales_and_zp(x, arguments, torch.nn.Module(), global_scale)
    return their_fake_quantize(x, scale, zero, arguments, global_scale)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("name", SCHEMES)
def test_compressed_tensors_rounds_to_the_same_numbers(name: str, dtype: torch.dtype) -> None:
    scheme, x = SCHEMES[name], inputs(dtype)
    common = None
    if scheme.dynamic == "local":
        common = generate_gparam(x[0].amin(), x[0].amax())  # what calibration has seen: the rest may saturate
    tensors = {} if common is None else {"input_global_scale": common}
    found, expected = fake_quantize(x, scheme, tensors), theirs(x, scheme, common)
    assert found.dtype == expected.dtype == dtype
    assert torch.equal(found, expected)
    flat = fake_quantize(x[0], scheme, tensors)  # as a kernel has them
    if scheme.strategy != "tensor":
        assert torch.equal(flat, expected[0])


@pytest.mark.parametrize("name", ["mxfp4", "mxfp8"])
def test_subnormal_groups_are_kept(name: str) -> None:
    """compressed-tensors has zeros for float16 groups of subnormal numbers."""
    tiny = torch.full((1, 32), 2.0**-16, dtype=torch.float16)
    assert torch.equal(fake_quantize(tiny, SCHEMES[name], {}), tiny)


@pytest.mark.parametrize("value", [float("inf"), -float("inf"), float("nan")])
@pytest.mark.parametrize("name", ["mxfp4", "mxfp8"])
def test_what_is_no_number_spoils_its_group_and_no_other(name: str, value: float) -> None:
    x = torch.randn(3, 64)
    x[1, 5] = value
    found, expected = fake_quantize(x, SCHEMES[name], {}), theirs(x, SCHEMES[name], None)
    assert bool(found[1, :32].isnan().all())
    assert torch.equal(found.isnan(), expected.isnan())
    assert torch.equal(found.nan_to_num(), expected.nan_to_num())


@pytest.mark.parametrize("name", SCHEMES)
def test_no_value_could_be_nearer(name: str) -> None:
    """By brute force over all codes at the scales that were found, in float64."""
    scheme = SCHEMES[name]
    if not scheme.symmetric:
        pytest.skip("the codes of a zero point are shifted")
    x = torch.randn(7, 128) * torch.logspace(-2, 2, 7)[:, None]
    tensors = {"input_global_scale": 2688 / x.abs().max().reshape(1)}
    size = scheme.group_size or 128
    grouped = x if scheme.strategy == "tensor" else x.view(7, -1, size)
    scale, zero = dynamic_grid(grouped, scheme, tensors["input_global_scale"])
    assert zero is None
    if scheme.type == "int":
        every = torch.arange(-(2 ** (scheme.bits - 1)), 2 ** (scheme.bits - 1)).double()
    elif scheme.e2m1:
        every = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6], dtype=torch.float64)
        every = torch.cat([every, -every])
    else:
        every = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).double()
        every = every[every.isfinite()]
    spread = scale.double().expand(grouped.shape).reshape(7, 128)
    nearest = (x.double()[..., None] - every * spread[..., None]).abs().amin(-1)
    found = (x.double() - fake_quantize(x, scheme, tensors).double()).abs()
    assert torch.allclose(found, nearest, rtol=1e-4, atol=1e-7 * float(x.abs().max()))


@pytest.mark.parametrize(
    ("scheme", "reason"),
    [
        (ActivationScheme(4, "float"), "scales of e8m0 or e4m3"),
        (ActivationScheme(6, "float"), "float8 or float4"),
        (ActivationScheme(8, strategy="group"), "exactly when"),
        (ActivationScheme(8, group_size=32), "exactly when"),
        (ActivationScheme(8, dynamic=False), "not of a token"),
        (ActivationScheme(8, "float", True, "local", "group", 16, "e4m3"), "all three or none"),
        (ActivationScheme(8, strategy="group", group_size=32, scales="e8m0"), "groups of float"),
        (ActivationScheme(8, "float", strategy="group", group_size=64, scales="e8m0"), "groups of 32"),
        (ActivationScheme(8, "float", strategy="group", group_size=96), "not whole groups of 96"),
        (ActivationScheme(8, "float", False, strategy="group", group_size=32), "symmetric"),
    ],
)
def test_what_does_not_exist_is_refused(scheme: ActivationScheme, reason: str) -> None:
    assert reason in (scheme.why_not(256) or "")


@pytest.mark.parametrize("name", SCHEMES)
def test_the_words_of_compressed_tensors_say_all_of_it(name: str) -> None:
    scheme = SCHEMES[name]
    assert scheme.why_not(256) is None
    written = QuantizationArgs(**scheme.to_config())
    assert ActivationScheme.from_arguments(scheme.to_config()) == scheme
    assert ActivationScheme.from_arguments(written.model_dump()) == scheme


@pytest.mark.parametrize(
    ("arguments", "name"),
    [
        ({"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16, "dynamic": "local"}, "nvfp4"),
        ({"num_bits": 4, "type": "float", "strategy": "group", "group_size": 32, "dynamic": True}, "mxfp4"),
        ({"num_bits": 8, "type": "int", "strategy": "token", "group_size": -1, "dynamic": True}, "token int8"),
        (
            {"num_bits": 8, "type": "float", "strategy": "token", "dynamic": True, "scale_dtype": "torch.bfloat16"},
            "token fp8",
        ),
    ],
)
def test_what_others_leave_out_or_add(arguments: dict[str, object], name: str) -> None:
    assert ActivationScheme.from_arguments({"symmetric": True, **arguments}) == SCHEMES[name]


def test_a_group_size_that_is_no_integer() -> None:
    arguments = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "group", "dynamic": True}
    for size in ("128", None, [128]):
        with pytest.raises(ValueError, match="expected a positive integer"):
            ActivationScheme.from_arguments({**arguments, "group_size": size})


@pytest.mark.parametrize(("prefix", "behind"), [((256,), "1 prefix token"), ((7, 200), "2 prefix tokens")])
def test_a_prefix_is_described(prefix, behind):
    scheme = ActivationScheme(dynamic=False, strategy="tensor", prefix=prefix)
    assert scheme.describe() == f"a8 static behind {behind}"
