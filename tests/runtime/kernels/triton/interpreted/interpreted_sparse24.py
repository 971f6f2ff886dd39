import pytest
import torch
from cases import assert_close, rows
from triton_references import codes_and_mask, dequantize, forced, linear, reorder, sparse

from runtime.kernels.triton import sparse24_w4

PAIRS = torch.tensor([[0, 1], [0, 2], [0, 3], [1, 2], [1, 3], [2, 3]])


@pytest.mark.parametrize(
    "case", [(1, 4, 0, False), (2, 8, 0, True), (5, 260, 64, True), (13, 300, 128, False), (9, 580, 192, True), (5, 512, 256, False)],
    ids=str,
)  # fmt: skip
def test_sparse(case):
    n, k, group, asymmetric = case
    generator = torch.Generator().manual_seed(3)
    codes = torch.randint(-8, 8, (n, k // 2), dtype=torch.int8, generator=generator)
    pairs = PAIRS[torch.randint(0, 6, (n, k // 4), generator=generator)]
    groups = -(-k // group) if group else 1
    scale = ((torch.rand(n, groups, generator=generator) - 0.4) * 0.1).to(torch.bfloat16)
    zero = torch.randint(-8, 8, (n, groups), dtype=torch.int8, generator=generator) if asymmetric else None
    w = sparse(codes, pairs, scale, zero, k, group)
    back = sparse24_w4.unpack(w)
    assert torch.equal(back[0], codes)
    assert torch.equal(torch.stack(back[1:], -1), pairs)
    every, mask = codes_and_mask(w)
    assert bool((mask.view(n, -1, 4).sum(-1) == 2).all())
    dense = dequantize(reorder(every, scale, zero, group, 4), torch.bfloat16)
    assert torch.equal(sparse24_w4.dequantize(w, torch.bfloat16), dense)
    for m, config in ((1, None), (3, None), (2, {"BLOCK_N": 4, "TILES": 2, "SPLIT_K": 2, "num_warps": 4})):
        x, bias = rows(m, k, strided=True), rows(1, n, seed=1)[0]
        with forced(config):
            assert_close(sparse24_w4.linear(x, w, bias), linear(x, w, bias), torch.bfloat16)
    x = rows(9, k)
    assert torch.equal(sparse24_w4.linear(x, w), torch.nn.functional.linear(x, dense))
    assert sparse24_w4.linear(x[:0], w).shape == (0, n)


def test_many_rows_go_where_tuning_sends_them(monkeypatch):
    codes, pairs = torch.randint(-8, 8, (32, 64), dtype=torch.int8), PAIRS[torch.randint(0, 6, (32, 32))]
    w = sparse(codes, pairs, torch.rand(32, 1).bfloat16(), None, 128, 0)
    x, calls, offered = rows(300, 128), [], []

    def multiply(x, weight, bias):
        calls.append(bool(((weight.view(32, -1, 4) != 0).sum(-1) <= 2).all()))
        return torch.nn.functional.linear(x, weight, bias)

    def last(kernel, key, x, candidates, launch):
        offered.append(list(candidates))
        return candidates[-1]

    monkeypatch.setattr(sparse24_w4.semi_structured, "linear", multiply)
    monkeypatch.setattr(sparse24_w4.tuning, "choose", last)
    expected = torch.nn.functional.linear(x, sparse24_w4.dequantize(w, torch.bfloat16))
    assert torch.equal(sparse24_w4.linear(x, w), expected)
    assert not offered  # not on a CPU
    assert not calls
    monkeypatch.setattr(sparse24_w4.semi_structured, "worth_timing", lambda *_: True)
    assert torch.equal(sparse24_w4.linear(x, w), expected)
    assert offered[-1] == [{"sparse": False}, {"sparse": True}]
    assert calls == [True]
