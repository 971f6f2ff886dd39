"""Caches of draft models: memory that grows, passes of bounded size, states and trees beside the texts."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from draft_models import draft_model
from llama_engines import engines
from speculation_cases import accept_head, prompts

from runtime.drafting.draft_cache import DraftCache, Slot
from runtime.drafting.drafters.confident import Confident, StateCache
from runtime.drafting.drafters.model import Candidates
from runtime.kernels.cpu import library
from runtime.sampling.tree import ROOT

pytestmark = pytest.mark.skipif(library.load() is None, reason="needs a C compiler: CC, cc, gcc or clang")


def test_slots_grow_and_share_memory() -> None:
    lean = engines(draft_model())[1]
    cache = DraftCache(lean)
    texts = prompts(20, 150, seed=3)
    opened = [Slot() for _ in texts]
    found = cache.feed(opened, texts)
    for row, text in zip(found, texts, strict=True):
        assert torch.equal(row, lean.logits(torch.tensor([text]))[0, -1])
    del opened[0].tokens[1:]
    again = cache.feed([opened[0]], [texts[0][1:] or [9]])
    if len(texts[0]) > 1:
        assert torch.equal(again[0], found[0])
    for slot in opened:
        cache.close(slot)
    before = cache.nbytes
    cache.feed([Slot() for _ in texts], texts)
    assert cache.nbytes == before


def test_states_are_those_of_the_logits_in_however_many_passes() -> None:
    lean = engines(draft_model())[1]
    cache = StateCache(lean)
    texts = prompts(6, 20, seed=4)
    whole = cache.feed([Slot() for _ in texts], texts)
    states = cache.states
    assert states.shape == (6, lean.module.config.hidden_size)
    for most in (1, 8, 21):
        cache.most_rows = most
        assert torch.equal(cache.feed([Slot() for _ in texts], texts), whole)
        assert torch.equal(cache.states, states)
    torch.testing.assert_close(lean.module.get_output_embeddings()(states), whole, rtol=1e-3, atol=1e-3)


def test_more_than_a_pass_takes_goes_in_several() -> None:
    lean = engines(draft_model())[1]
    cache = DraftCache(lean)
    texts = [text[:4] for text in prompts(6, 40, seed=4)]
    opened = [Slot() for _ in texts]
    cache.feed(opened, texts)
    branches, parents = [[5, 6, 7]] * 6, [[ROOT, 0, ROOT]] * 6
    whole = cache.branch(opened, branches, parents)
    more = [[8, 9], [], [8], [8, 9, 10], [1], [2]]
    ahead = cache.ahead([Slot() for _ in texts], texts, more)
    verify, rows = lean.verify, []

    def counted(pool: Any, pieces: Any, hidden: bool = False) -> Any:
        rows.append(sum(len(piece.tokens) for piece in pieces))
        return verify(pool, pieces, hidden)

    lean.verify = counted  # type: ignore[method-assign]
    cache.most_rows = 13
    for found, wanted in zip(cache.branch(opened, branches, parents), whole, strict=True):
        assert torch.equal(found, wanted)
    assert rows == [12, 6]
    rows.clear()
    for found, wanted in zip(cache.ahead([Slot() for _ in texts], texts, more), ahead, strict=True):
        assert torch.equal(found, wanted)
    assert len(rows) < 6
    assert max(rows) <= 13


def test_a_head_of_acceptance_is_where_the_states_are() -> None:
    cache = StateCache(SimpleNamespace(device=torch.device("meta"), most_rows=8))
    own = Confident(cache=cache, candidates=Candidates(9), head=accept_head(4))
    assert {tensor.device.type for tensor in own.head.tensors.values()} == {"meta"}


def test_branches_of_a_slot_are_computed_level_by_level() -> None:
    lean = engines(draft_model())[1]
    cache = DraftCache(lean)
    slot, text = Slot(), [7, 8, 9]
    cache.feed([slot], [text])
    (first,) = cache.branch([slot], [[1, 2]], [[ROOT, ROOT]])
    (second,) = cache.branch([slot], [[3, 4]], [[ROOT, ROOT, 1, 0]])
    for row, branch in ((first[0], [1]), (first[1], [2]), (second[0], [2, 3]), (second[1], [1, 4])):
        assert torch.equal(row, lean.logits(torch.tensor([text + branch]))[0, -1])
    assert slot.tokens == text
