"""Measuring drafters on the same prompts again and again: what was written before must not be there to be copied."""

from __future__ import annotations

from typing import Any

import pytest
from drafter_cases import FREE
from speculation_cases import model, prompts, speculation

from compress.evaluate.draft_totals import DraftTotals
from compress.evaluate.drafters import decode_seconds
from runtime.decoding.drafters.first_of import FirstOf
from runtime.kernels.cpu import library

pytestmark = pytest.mark.skipif(library.load() is None, reason="needs a C compiler: CC, cc, gcc or clang")


@pytest.mark.parametrize("name", ["suffix", "trie", "hierarchy", "recycling", "adaptive_ngram", "composed"])
def test_a_second_pass_knows_nothing_of_the_first(name: str) -> None:
    drafter: Any = FirstOf([FREE["suffix"](), FREE["trie"]()]) if name == "composed" else FREE[name]()
    drafting = model(speculation(drafter))
    texts = prompts(3, 30)
    steps = []
    for _ in range(3):
        totals = DraftTotals()
        decode_seconds(drafting, texts, 48, 1, totals)
        steps.append(totals.steps)
    # Rates that were learned stay, so that trees are not the same, but no text is written in a few long copies.
    assert min(steps[1:]) > 0.8 * steps[0]
    before = DraftTotals()
    for text in texts:
        drafting.generate(text, max_new_tokens=48, ignore_eos=True)
        before.add(drafting.stats)
    assert before.steps < min(steps)  # and without forgetting it would be
    facts = before.facts()
    assert facts["accepted_tokens"] <= facts["drafted_tokens"]
    assert facts["mean_accepted"] > 0
    assert 0 < facts["acceptance_rate"] <= 1
