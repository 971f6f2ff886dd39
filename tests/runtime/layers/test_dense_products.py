"""Widened products: the same numbers as 16-bit arithmetic, and only where they are faster."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

from runtime.engines.torch import engine as engine_module
from runtime.engines.torch.encoder import TorchEncoderEngine
from runtime.engines.torch.engine import TorchEngine
from runtime.engines.torch.seq2seq import TorchSeq2SeqEngine
from runtime.layers import dense_products
from runtime.layers.dense_products import FEWEST_ROWS, WidenedProducts, products


class _Products(TorchDispatchMode):
    """Dtypes of the matrices that products really get while the mode is active."""

    def __init__(self) -> None:
        super().__init__()
        self.dtypes: list[torch.dtype] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        aten = torch.ops.aten
        if func is aten.linear.default:  # as it is in inference mode
            self.dtypes += [value.dtype for value in args[:2]]
        elif func in (aten.mm.default, aten.mm.out, aten.addmm.default, aten.bmm.default, aten.baddbmm.default):
            self.dtypes += [value.dtype for value in args[-2:]]
        return func(*args, **(kwargs or {}))


@pytest.fixture
def seen():
    with _Products() as watched:
        yield watched.dtypes


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_widened_product_is_the_float32_product_rounded_once(dtype, seen) -> None:
    generator = torch.Generator().manual_seed(0)
    x, w, b = (torch.randn(shape, generator=generator).to(dtype) for shape in ((3, 9, 40), (24, 40), (24,)))
    with WidenedProducts():
        y = functional.linear(x, w, b)
        assert seen == [torch.float32] * 2
        named = functional.linear(input=x, weight=w, bias=b)
        product = x @ w.T
        assert seen == [torch.float32] * 6
        added = torch.addmm(b, x.flatten(0, 1), w.T, alpha=0.5)
        assert seen == [torch.float32] * 8
        other = x + x
        assert len(seen) == 8, "sums are no products"
    assert {each.dtype for each in (y, named, product, added, other)} == {dtype}
    assert torch.equal(y, functional.linear(x.float(), w.float(), b.float()).to(dtype))
    assert torch.equal(y, named)
    assert torch.equal(product, (x.float() @ w.float().T).to(dtype))
    assert torch.equal(added, torch.addmm(b.float(), x.flatten(0, 1).float(), w.float().T, alpha=0.5).to(dtype))
    # One rounding is at most half of the last bit: bfloat16 has 8, float16 11.
    exact = functional.linear(x.double(), w.double(), b.double())
    torch.testing.assert_close(y.double(), exact, rtol=torch.finfo(dtype).eps, atol=1e-4)


def test_float32_and_results_with_a_place_of_their_own_pass_through(seen) -> None:
    x, w = torch.randn(FEWEST_ROWS, 8), torch.randn(6, 8)
    out = torch.zeros(FEWEST_ROWS, 6, dtype=torch.bfloat16)
    with WidenedProducts():
        assert functional.linear(x, w).dtype == torch.float32
        torch.mm(x.bfloat16(), w.bfloat16().T, out=out)
    assert seen == [torch.float32] * 2 + [torch.bfloat16] * 2
    assert out.abs().sum() > 0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_mode_is_for_types_that_the_cpu_does_not_multiply(dtype, monkeypatch) -> None:
    monkeypatch.setattr(dense_products.processes, "multiplies", lambda asked: asked != dtype)
    assert isinstance(products(torch.device("cpu"), dtype), WidenedProducts)
    for device, other in (
        ("cuda", dtype),
        ("cpu", torch.float32),
        ("cpu", ({*dense_products.WIDENED} - {dtype}).pop()),
    ):
        assert not isinstance(products(torch.device(device), other), WidenedProducts)


def test_few_rows_are_multiplied_as_they_are(seen) -> None:
    w = torch.randn(6, 8).bfloat16()
    for rows, dtype in ((FEWEST_ROWS - 1, torch.bfloat16), (FEWEST_ROWS, torch.float32)):
        x = torch.randn(rows, 8).bfloat16()
        seen.clear()
        with WidenedProducts():
            functional.linear(x, w)
            torch.addmm(torch.zeros(6).bfloat16(), x, w.T)
        assert seen == [dtype] * 4


@pytest.mark.parametrize("bias", [None, torch.randn(10).bfloat16()])
def test_large_weights_are_multiplied_in_parts(bias, seen) -> None:
    x, w = torch.randn(2, FEWEST_ROWS, 8).bfloat16(), torch.randn(10, 8).bfloat16()
    for most, parts in ((80, 1), (79, 2), (31, 4), (7, 10)):
        seen.clear()
        with WidenedProducts(most):
            found = functional.linear(x, w, bias=bias)
        assert seen == [torch.float32] * 2 * parts
        wanted = functional.linear(x.double(), w.double(), None if bias is None else bias.double())
        torch.testing.assert_close(found.double(), wanted, rtol=2**-8, atol=1e-4)
    seen.clear()
    with WidenedProducts(79):
        x @ w.T
    assert seen == [torch.bfloat16] * 2, "no linear layer"


def test_rows_are_those_of_one_product_of_a_batch(seen) -> None:
    keys = torch.randn(2, 20, 8, 30).bfloat16()
    for rows, dtype in ((1, torch.bfloat16), (FEWEST_ROWS, torch.float32)):
        queries = torch.randn(2, 20, rows, 8).bfloat16()
        seen.clear()
        with WidenedProducts():
            found = queries @ keys
            torch.bmm(queries[0], keys[0])
            torch.baddbmm(found[0], queries[0], keys[0])
        assert seen == [dtype] * 6


def test_arguments_may_be_named(seen) -> None:
    x, w = torch.randn(FEWEST_ROWS, 8).bfloat16(), torch.randn(8, 6).bfloat16()
    bias, many = torch.randn(6).bfloat16(), torch.zeros(FEWEST_ROWS, 6).bfloat16()
    with WidenedProducts():
        found = [
            torch.addmm(input=bias, mat1=x, mat2=w), torch.addmm(bias, mat1=x, mat2=w), bias.addmm(x, mat2=w),
            torch.addmm(many, x, w), many[None].baddbmm(batch1=x[None], batch2=w[None])[0],
            torch.matmul(input=x, other=w), x.mm(mat2=w),
        ]  # fmt: skip
    assert seen == [torch.float32] * 14
    assert {each.dtype for each in found} == {torch.bfloat16}
    assert torch.equal(found[0], found[2])
    for other in (torch.float32, torch.float16):
        with WidenedProducts(), pytest.raises(RuntimeError):
            torch.mm(x, w.to(other))
    with WidenedProducts():
        assert (x[0] @ w).shape == (6,)
        assert (x @ w[:, 0]).shape == (FEWEST_ROWS,)


def decoder() -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    engine = TorchEngine(LlamaForCausalLM(LlamaConfig(**SIZES, intermediate_size=24)).bfloat16(), CPU)
    return lambda ids: engine.forward(ids, None, None, None)


def encoder() -> Any:
    from transformers import BertConfig, BertModel

    engine = TorchEncoderEngine(BertModel(BertConfig(**SIZES, intermediate_size=24)).bfloat16(), CPU)
    return lambda ids: engine.forward(ids, None)


def encoder_of_two_stacks() -> Any:
    return lambda ids: seq2seq().encode(ids, None)


def decoder_of_two_stacks() -> Any:
    states = torch.randn(1, 3, 16).bfloat16()
    return lambda ids: seq2seq().decode(ids, states, None, None)


def seq2seq() -> TorchSeq2SeqEngine:
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(vocab_size=32, d_model=16, d_kv=8, d_ff=24, num_layers=1, num_heads=2, decoder_start_token_id=0)
    return TorchSeq2SeqEngine(T5ForConditionalGeneration(config).bfloat16(), CPU)


CPU = torch.device("cpu")
SIZES = {"vocab_size": 32, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}


@pytest.mark.parametrize("make", [decoder, encoder, encoder_of_two_stacks, decoder_of_two_stacks])
def test_engines_of_modules_widen_many_rows_where_that_is_faster(make, seen, monkeypatch) -> None:
    run = make()
    for multiplied, rows, wide in ((False, FEWEST_ROWS, True), (False, 1, False), (True, FEWEST_ROWS, False)):
        monkeypatch.setattr(dense_products.processes, "multiplies", lambda dtype, known=multiplied: known)
        seen.clear()
        run(torch.arange(rows)[None])
        assert (torch.float32 in seen) == wide
        assert seen.count(torch.bfloat16) >= (0 if wide else 6)
    monkeypatch.setattr(dense_products.processes, "multiplies", lambda dtype: False)
    seen.clear()
    run(torch.arange(FEWEST_ROWS)[None])
    before = len(seen)
    monkeypatch.setattr(engine_module, "LARGEST_WIDENED", 10)
    run(torch.arange(FEWEST_ROWS)[None])
    assert len(seen) > 3 * before, "all weights are larger"


def test_products_of_a_module_may_be_left_to_torch(seen, monkeypatch) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    monkeypatch.setattr(dense_products.processes, "multiplies", lambda dtype: False)
    module = LlamaForCausalLM(LlamaConfig(**SIZES, intermediate_size=24)).bfloat16().eval()
    ids = torch.arange(FEWEST_ROWS)[None]
    dense_products.leave_products(module)
    found = TorchEngine(module, CPU).forward(ids, None, None, None)
    assert torch.float32 not in seen
    with torch.inference_mode():
        assert torch.equal(found, module(input_ids=ids).logits.float())
