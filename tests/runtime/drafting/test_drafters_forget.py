"""Measuring drafters on the same prompts again and again: what was written before must not be there to be copied."""

from __future__ import annotations

from typing import Any

import pytest
from drafter_cases import FREE
from speculation_cases import model, prompts, speculation

from compress.evaluate.drafters import add, decode
from runtime.drafting.drafters.composition import Fallback
from runtime.kernels.cpu import library
from runtime.sampling.stats import GenerationStats

pytestmark = pytest.mark.skipif(library.load() is None, reason="needs a C compiler: CC, cc, gcc or clang")


@pytest.mark.parametrize("name", ["suffix", "trie", "hierarchy", "recycling", "adaptive-ngram", "composed"])
def test_a_second_pass_knows_nothing_of_the_first(name: str) -> None:
    drafter: Any = Fallback([FREE["suffix"](), FREE["trie"]()]) if name == "composed" else FREE[name]()
    drafting = model(speculation(drafter))
    texts = prompts(3, 30)
    steps = [decode(drafting, texts, 48, 1)[1].steps for _ in range(3)]
    # Rates that were learned stay, so that trees are not the same, but no text is written in a few long copies.
    assert min(steps[1:]) > 0.8 * steps[0]
    remembered = GenerationStats()
    for text in texts:
        drafting.generate(text, max_new_tokens=48, ignore_eos=True)
        add(remembered, drafting.stats)
    assert remembered.steps < min(steps)  # and without forgetting it would be
    assert 0 < remembered.accepted_tokens <= remembered.drafted_tokens
    assert 0 < remembered.acceptance_rate <= 1
    assert remembered.mean_accepted == pytest.approx(remembered.accepted_tokens / remembered.draft_rounds)
    assert sum(remembered.accepted_by_depth) == remembered.accepted_tokens
