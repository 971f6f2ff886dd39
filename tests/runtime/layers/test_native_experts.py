"""Compressed experts of transformers' mixtures: C gives what the loop over layers gives, and gives way to who watches or trains."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from family_models import FAMILIES
from weight_cases import int_scheme, random_weight

from runtime import formats
from runtime.formats.quantization_config import ModuleEntry
from runtime.kernels.cpu import library
from runtime.layers.compressed_linear import CompressedLinear, prepare_all
from runtime.layers.native_experts import NativeExperts
from runtime.modeling.experts import Experts, Gate, find_fused, gate_of, unfuse

pytestmark = pytest.mark.skipif(library.load() is None, reason="needs a C compiler")


def skeleton(name: str) -> tuple[Any, str]:
    """A tiny model of a family, and where its first experts are."""
    import transformers

    config = next(f for f in FAMILIES if f.name == name).config()
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    return model, next(iter(find_fused(model)))


def experts_of(name: str, dtype: torch.dtype = torch.float32, kernels: str = "auto") -> Experts:
    """Its experts, in 4 bits."""
    model, home = skeleton(name)
    unfuse(model, {home})
    experts = model.get_submodule(home)
    assert isinstance(experts, Experts)
    scheme, seed = int_scheme(4, True, 32), 0
    for expert in experts.one_by_one():
        for projection in experts.layout.projections:
            old = expert.get_submodule(projection)
            shape, seed = (old.out_features, old.in_features), seed + 1
            tensors = formats.choose(scheme, shape).pack(random_weight(scheme, shape, dtype, seed))
            bias = torch.randn(shape[0]).to(dtype) if experts.layout.bias else None
            entry = ModuleEntry(scheme, formats.choose(scheme, shape).name, None)
            setattr(expert, projection, CompressedLinear.from_tensors(entry, shape, tensors, bias, dtype))
    prepare_all(experts, kernels)
    experts.compute = NativeExperts()
    return experts


def call(experts: Experts, rows: int = 9, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, ...]:
    index = torch.stack([torch.randperm(experts.count)[:2] for _ in range(rows)])
    return torch.randn(rows, experts.layout.hidden).to(dtype) / 8, index, torch.rand(rows, 2).to(dtype)


def loop(experts: Experts, *operands: torch.Tensor) -> torch.Tensor:
    """What the Python loop gives."""
    compute, experts.compute = experts.compute, None
    try:
        return experts(*operands)
    finally:
        experts.compute = compute


def used(experts: Experts, *operands: torch.Tensor) -> bool:
    """Whether C computed it."""
    assert experts.compute is not None
    return experts.compute(experts, *operands) is not None


@pytest.mark.parametrize("name", ["mixtral", "qwen3_moe", "granitemoe", "gpt_oss", "deepseek_v3", "jamba"])
def test_experts_in_c_give_what_the_loop_gives(name: str) -> None:
    experts = experts_of(name)
    with torch.inference_mode():
        for rows in (1, 9):
            operands = call(experts, rows)
            assert used(experts, *operands)
            torch.testing.assert_close(experts(*operands), loop(experts, *operands), rtol=1e-4, atol=1e-4)


def test_sixteen_bit_experts_are_closer_to_what_their_weights_say() -> None:
    experts = experts_of("mixtral", torch.bfloat16)
    exact = copy.deepcopy(experts).float()
    with torch.inference_mode():
        operands = call(experts, dtype=torch.bfloat16)
        truth = exact(operands[0].float(), operands[1], operands[2].float())
        found, looped = experts(*operands), loop(experts, *operands)
    assert found.dtype == looped.dtype == torch.bfloat16
    assert float((found.float() - truth).norm()) <= float((looped.float() - truth).norm())


def test_who_watches_trains_or_replaces_layers_gets_the_loop() -> None:
    experts = experts_of("gpt_oss")
    operands = call(experts)
    seen: list[int] = []
    with torch.inference_mode():
        before = experts(*operands)
        handle = experts[1].up_proj.register_forward_hook(lambda *_: seen.append(1))
        experts(*operands)
        assert bool(seen) == bool((operands[1] == 1).any())
        handle.remove()
        assert used(experts, *operands)
        experts.everyone = {0}
        assert not used(experts, *operands)
        experts.everyone = set()
        assert torch.equal(experts(*operands), before)
    operands[0].requires_grad_()
    assert not used(experts, *operands)
    experts(*operands).sum().backward()
    assert operands[0].grad is not None


def test_other_tensors_are_read_anew() -> None:
    experts = experts_of("mixtral")
    operands = call(experts)
    with torch.inference_mode():
        first = experts(*operands)
        dense = experts[0].down_proj.dense()
        dense.weight.data *= 2
        experts[0].down_proj = dense
        second = experts(*operands)
        torch.testing.assert_close(second, loop(experts, *operands), rtol=1e-4, atol=1e-4)
        assert not torch.equal(first, second)
        again = copy.deepcopy(experts)
        assert torch.equal(again(*operands), second)
        experts.half()
        assert not used(experts, *operands)  # what it is given is still float32
        assert used(experts, operands[0].half(), *operands[1:])


def test_the_reference_stays_the_reference() -> None:
    experts = experts_of("mixtral", kernels="reference")
    with torch.inference_mode():
        assert not used(experts, *call(experts))


def test_gates_are_found_by_trying_them() -> None:
    for name, gate in (("mixtral", Gate("silu")), ("gpt_oss", Gate("clamped", 1.702, 7.0))):
        model, home = skeleton(name)
        fused = model.get_submodule(home)
        assert gate_of(fused) == gate
        unfuse(model, {home})
        assert gate_of(model.get_submodule(home)) == gate
        fused._apply_gate = lambda both: both[..., : both.shape[-1] // 2] * both[..., both.shape[-1] // 2 :]
        assert gate_of(model.get_submodule(home)) is None
    assert gate_of(torch.nn.Linear(2, 2)) is None
