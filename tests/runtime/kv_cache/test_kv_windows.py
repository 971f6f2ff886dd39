"""Newest queries against a list of them, and the tokens that stay against a sort."""

from __future__ import annotations

import pytest
import torch

from runtime.kv_cache.layer_state import QueryWindow, best_places, newest_run


@pytest.mark.parametrize("seed", range(4))
def test_a_window_is_the_end_of_all_that_came(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    held, truth, window = QueryWindow(), torch.zeros(3, 2, 0, 4), 9
    for _ in range(60):
        action = int(torch.randint(0, 6, (1,), generator=generator))
        if action == 0 and truth.shape[2]:
            held.take_back(2)
            truth = truth[:, :, : max(0, truth.shape[2] - 2)]
        elif action == 1:
            rows = torch.randint(0, 3, (3,), generator=generator)
            held.select(rows)
            truth = truth[rows]
        elif action == 2:
            held.forget(4)
            truth = truth[:, :, -4:]
        else:
            new = torch.randn(3, 2, 13 if action == 3 else 1, 4, generator=generator)
            held.append(new, window)
            # What is behind the window may be gone, and does not come back when newer ones are taken.
            truth = torch.cat([truth, new], 2)[:, :, -window:]
        if truth.shape[2]:
            count = truth.shape[2]
            assert torch.equal(held.newest(window)[:, :, -count:], truth)
            assert held.nbytes <= 2 * window * 3 * 2 * 4 * 4
    held.forget(0)
    assert held.nbytes == 0


def test_padding_of_a_later_piece_goes_before_what_is_held() -> None:
    """A row's newest queries are those of its newest tokens, however many of the piece were its own."""
    generator = torch.Generator().manual_seed(0)
    held, rows = QueryWindow(), [torch.zeros(2, 0, 4) for _ in range(3)]
    for count, padding in ((7, (3, 0, 0)), (1, (0, 0, 0)), (5, (0, 4, 5)), (1, (1, 0, 0)), (6, (2, 0, 1))):
        new = torch.randn(3, 2, count, 4, generator=generator)
        valid = torch.arange(count) >= torch.tensor(padding)[:, None]
        held.append(new, 8, valid if any(padding) else None)
        rows = [torch.cat([row, new[i][:, valid[i]]], 1) for i, row in enumerate(rows)]
        for i, row in enumerate(rows):
            most = min(8, row.shape[1])
            assert torch.equal(held.newest(8)[i, :, -most:], row[:, -most:])


def test_the_best_tokens_stay_in_their_order() -> None:
    generator = torch.Generator().manual_seed(0)
    score = torch.randint(0, 5, (2, 3, 40), generator=generator).float()
    lengths = torch.tensor([[40, 31, 12], [7, 40, 25]])
    score = score.masked_fill(torch.arange(40) >= lengths[..., None], float("-inf"))
    counts = torch.tensor([[10, 31, 0], [7, 39, 1]])
    places, wanted = best_places(score, counts)
    runs = []
    for b in range(2):
        for h in range(3):
            order = sorted(range(int(lengths[b, h])), key=lambda i: (-float(score[b, h, i]), -i))
            kept = sorted(order[: int(counts[b, h])])
            assert places[b, h][wanted[b, h]].tolist() == kept
            newest = range(int(lengths[b, h]) - 1, -1, -1)
            runs.append(next((n for n, i in enumerate(newest) if i not in kept), int(lengths[b, h])))
    assert newest_run(places, counts, score) == min(runs) == 0
    everything, _ = best_places(score, lengths)
    assert newest_run(everything, lengths, score) == 7
