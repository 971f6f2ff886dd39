"""Routing against plain torch: chosen experts, their weights, and pairs in the order of experts."""

import pytest
import torch
from cases import rows

from runtime.kernels.triton.routing import most_blocks, route, sort_pairs


@pytest.mark.parametrize(("tokens", "count", "choices"), [(1, 1, 1), (3, 6, 2), (5, 4, 4), (2, 130, 8), (4, 7, 5)])
@pytest.mark.parametrize("of_chosen", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_route(tokens, count, choices, of_chosen, dtype):
    logits = rows(tokens, count, dtype, strided=True)  # a row of equal logits among them
    chosen, weights = route(logits, choices, of_chosen, 1.5)
    ordered, index = logits.float().sort(dim=-1, descending=True, stable=True)
    wanted = ordered[:, :choices].softmax(-1) if of_chosen else ordered.softmax(-1)[:, :choices]
    assert chosen.dtype == torch.int32
    assert torch.equal(chosen.long(), index[:, :choices])
    torch.testing.assert_close(weights, wanted * 1.5)


def test_of_equal_logits_the_first_are_chosen():
    logits = torch.tensor([[1.0, 2.0, 2.0, 0.0, 2.0], [0.0] * 5, [3.0, 3.0, 1.0, 3.0, 3.0]])
    assert route(logits, 2, True)[0].tolist() == [[1, 2], [0, 1], [0, 1]]
    assert route(logits[:0], 2, True)[0].shape == (0, 2)


def test_numbers_that_are_none_choose_experts_that_exist():
    """What they give is not finite, but no weight outside the tensors is read."""
    logits = torch.full((3, 5), float("nan"))
    logits[1, 2:], logits[2] = 1.0, float("-inf")
    chosen, weights = route(logits, 4, True)
    for row in chosen.tolist():
        assert len(set(row)) == 4
        assert set(row) <= set(range(5))
    assert not weights.isfinite().any()


CHOSEN = {
    "one token": torch.tensor([[2, 0]]),
    "all to one": torch.zeros(40, 1),
    "all to the last": torch.full((40, 1), 5),
    "all experts": torch.arange(6).expand(9, 6),
    "some unused": torch.tensor([[1, 4], [4, 1], [1, 4]]),
    "many": torch.rand(150, 6, generator=torch.Generator().manual_seed(0)).argsort(-1)[:, :3],
    "parts": torch.rand(300, 300, generator=torch.Generator().manual_seed(0)).argsort(-1)[:, :2],
}


@pytest.mark.parametrize("size", [16, 32])
@pytest.mark.parametrize("name", CHOSEN)
def test_sort_pairs(name, size):
    chosen = CHOSEN[name].int().contiguous()
    count = max(6, int(chosen.max()) + 1)
    order, flat = sort_pairs(chosen, count, size), chosen.flatten()
    assert torch.equal(order.pairs.long(), flat.sort(stable=True)[1])
    assert order.blocks.shape == (3, most_blocks(flat.numel(), count, size))
    found = []
    for expert, first, end in order.blocks.t().tolist():
        if expert < 0:
            continue
        assert 0 < end - first <= size
        assert (flat[order.pairs[first:end].long()] == expert).all()
        found += range(first, end)
    assert found == list(range(flat.numel()))
    blocks = order.blocks[0].tolist()
    assert blocks == sorted(blocks, key=lambda expert: expert < 0), "those that there are come first"


@pytest.mark.parametrize(("pairs", "experts", "size"), [(1, 5, 4), (5, 5, 4), (6, 2, 4), (17, 3, 4), (40, 1, 16)])
def test_no_spread_of_pairs_makes_more_blocks(pairs, experts, size):
    def worst(left, others):
        if others == 1:
            return -(-left // size)
        return max(-(-own // size) + worst(left - own, others - 1) for own in range(left + 1))

    assert most_blocks(pairs, experts, size) == worst(pairs, experts)
