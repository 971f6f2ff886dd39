"""Products of experts against plain torch: packed and dense, ragged sizes, and choices of every kind."""

import pytest
import torch
from cases import WEIGHTS, assert_close, block_float, rows, weight
from triton_interpreter import watched
from triton_references import dequantize, forced

from runtime.kernels.triton import experts as kernels
from runtime.kernels.triton.layout import Stack
from runtime.kernels.triton.routing import sort_pairs

COUNT = 4
CHOSEN = {
    "one token": [[2, 0]],
    "all to one": [[3]] * 19,
    "all experts": [[0, 1, 2, 3], [3, 2, 1, 0], [2, 0, 3, 1]],
    "one unused": [[0, 2], [2, 3], [3, 2], [0, 3], [2, 0]],
}


def packed(case, field):
    """Several weights as one, each beside the others in memory."""
    every = [weight(*case, field, seed=number) for number in range(COUNT)]
    zero = None if every[0].zero is None else torch.stack([w.zero for w in every])
    words, scale = torch.stack([w.words for w in every]), torch.stack([w.scale for w in every])
    return Stack(words, scale, zero, every[0].shape, every[0].group, field), every


def expected(x, weights, chosen):
    """float64 products of each pair."""
    flat, share = chosen.flatten().tolist(), chosen.numel() // len(x)
    return torch.stack([x[pair // share].double() @ weights[expert].double().t() for pair, expert in enumerate(flat)])


def narrow(columns, size=16):
    return {"BLOCK_M": size, "BLOCK_N": 16, "COLUMNS": columns, "STAGES": 2, "num_warps": 4}


@pytest.mark.parametrize("field", [4, 8])
@pytest.mark.parametrize("case", WEIGHTS, ids=str)
def test_packed(case, field):
    stack, every = packed(case, field)
    first = WEIGHTS.index(case) % 2
    for number, (name, choices) in list(enumerate(CHOSEN.items()))[first::2]:
        chosen, dtype = torch.tensor(choices, dtype=torch.int32), (torch.bfloat16, torch.float16)[number % 2]
        x = rows(len(chosen), case[1], dtype, strided=True)
        size = (16, 64)[number // 2]
        held = (
            dtype if size > 32 and stack.group else torch.float64
        )  # scales of groups are applied to the weight, which rounds it
        with forced(narrow(stack.tile, size) if number else None):
            y = kernels.products(x, stack, chosen, sort_pairs(chosen, COUNT, size), chosen.shape[1])
        assert_close(y, expected(x, [dequantize(w, held) for w in every], chosen), dtype)
        if name != "all to one":  # many programs
            y = kernels.products(x, stack, chosen, None, chosen.shape[1])
            assert_close(y, expected(x, [dequantize(w, torch.float64) for w in every], chosen), dtype)


@pytest.mark.parametrize("name", ["mxfp4", "mxfp8"])
def test_packed_block_floats(name):
    case, chosen = (17, 160, name), torch.tensor(CHOSEN["one unused"], dtype=torch.int32)
    every = [block_float(*case, seed=number) for number in range(COUNT)]
    words, scale = torch.stack([w.words for w in every]), torch.stack([w.scale for w in every])
    stack, x = Stack(words, scale, None, every[0].shape, 32, every[0].field, codes="float"), rows(len(chosen), 160)
    for size, held in ((None, torch.float64), (16, torch.float64), (64, x.dtype)):
        with forced(narrow(stack.tile, size) if size else None):
            order = sort_pairs(chosen, COUNT, size) if size else None
            y = kernels.products(x, stack, chosen, order, chosen.shape[1])
        assert_close(y, expected(x, [dequantize(w, held) for w in every], chosen), x.dtype)


@pytest.mark.parametrize("field", [4, 8])
def test_packed_in_the_largest_blocks(field):
    stack, every = packed((5, 100, 32, True), field)
    chosen = torch.tensor([[3]] * 130 + [[1], [0]], dtype=torch.int32)  # a whole block, and the rest of another
    x, order = rows(len(chosen), 100), sort_pairs(chosen, COUNT, 128)
    with forced(narrow(stack.tile, 128)):
        y = kernels.products(x, stack, chosen, order, 1)
    assert_close(y, expected(x, [dequantize(w, torch.bfloat16) for w in every], chosen), torch.bfloat16)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(("n", "k"), [(1, 1), (7, 100), (40, 64)])
def test_dense(n, k, dtype):
    stack = Stack.dense(torch.randn(COUNT, n, k, generator=torch.Generator().manual_seed(0)).to(dtype))
    for choices in CHOSEN.values():
        chosen = torch.tensor(choices, dtype=torch.int32)
        x, order = rows(len(chosen), k, dtype, strided=True), sort_pairs(chosen, COUNT, 16)
        with forced(narrow(64)):
            y = kernels.products(x, stack, chosen, order, chosen.shape[1])
        assert_close(y, expected(x, stack.words, chosen), dtype)


@pytest.mark.parametrize("tokens", [1, 3, 40])
@pytest.mark.parametrize("fields", [(4, 4), (8, 4), (16, 16), (4, 16)], ids=str)
def test_layer(tokens, fields):
    """Gate, up and down projection, and the weighted sum of each token; other tokens in the step change no bit."""
    hidden, inner, choices = 48, 32, 2
    sides = ((2 * inner, hidden), (hidden, inner))
    stacks, weights = [], []
    for (n, k), field in zip(sides, fields, strict=True):
        if field == 16:
            stacks.append(
                Stack.dense(torch.randn(COUNT, n, k, generator=torch.Generator().manual_seed(n)).bfloat16() / 8)
            )
            weights.append(stacks[-1].words.double())
        else:
            stack, every = packed((n, k, 16, True), field)
            stacks.append(stack)
            weights.append(torch.stack([dequantize(w, torch.float64) for w in every]))
    generator = torch.Generator().manual_seed(tokens)
    chosen = torch.rand(tokens, COUNT, generator=generator).argsort(-1)[:, :choices].int()
    shares, x = torch.rand(tokens, choices, generator=generator), rows(tokens, hidden)
    wanted = torch.zeros(tokens, hidden, dtype=torch.float64)
    for token in range(tokens):
        for expert, share in zip(chosen[token].tolist(), shares[token].double(), strict=True):
            gate, up = (x[token].double() @ weights[0][expert].t()).bfloat16().chunk(2)
            wanted[token] += share * ((torch.nn.functional.silu(gate) * up).double() @ weights[1][expert].t())
    y = kernels.experts(x, chosen, shares, *stacks)
    assert y.dtype == torch.bfloat16
    assert float((y.double() - wanted).norm()) <= 1e-2 * float(wanted.norm())
    assert torch.equal(kernels.experts(x, chosen, shares, *stacks), y)
    if tokens == 40:
        back = kernels.experts(x.flip(0), chosen.flip(0), shares.flip(0), *stacks)
        assert torch.equal(back.flip(0), y)
    assert kernels.experts(x[:0], chosen[:0], shares[:0], *stacks).shape == (0, hidden)


@pytest.mark.parametrize("form", ["dense", "few rows", "many rows", "vector"])
def test_weights_of_experts_that_nobody_chose_are_not_read(form):
    chosen, size = torch.tensor([[0, 2], [3, 0]], dtype=torch.int32), 64 if form == "many rows" else 16
    stack = Stack.dense(torch.randn(COUNT, 8, 64).bfloat16()) if form == "dense" else packed((8, 64, 16, True), 4)[0]
    order = None if form == "vector" else sort_pairs(chosen, COUNT, size)
    with watched() as launches:
        y = kernels.products(rows(2, 64), stack, chosen, order, 2)
    (launch,) = launches
    assert y.isfinite().all()
    for tensor in {stack.words, stack.scale, stack.words if stack.zero is None else stack.zero}:
        assert [launch.loads(each) for each in tensor] == [True, False, True, True]
