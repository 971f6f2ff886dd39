"""Texts of many rounds of drafting and verifying, over tables for models, against the probabilities of the target."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch

from runtime.drafting.verify.base import Rule
from runtime.drafting.verify.target import TargetLogits
from runtime.sampling.options import GenerationOptions
from runtime.sampling.sampling import process
from runtime.sampling.tree import ROOT, Tree


def table_logits(vocabulary: int, seed: int, sharp: float = 2.0) -> torch.Tensor:
    """Logits `[vocab, vocab]` of a model that sees only the last token."""
    return sharp * torch.randn(vocabulary, vocabulary, generator=torch.Generator().manual_seed(seed))


def softmax(logits: torch.Tensor, options: GenerationOptions) -> torch.Tensor:
    return torch.softmax(process(logits[None], None, options)[0].double(), -1)


def drawn_tree(
    draft: torch.Tensor, start: int, shape: list[int], options: GenerationOptions, source: torch.Generator
) -> Tree:
    """Children drawn without replacement from a bigram draft, `shape[d]` of each node at depth d."""
    tree, level = Tree(), [(ROOT, start)]
    for width in shape:
        following = []
        for parent, token in level:
            q = softmax(draft[token], options)
            tree.proposals[parent] = q.float()
            count = min(width, int((q > 0).sum()))
            for child in torch.multinomial(q, count, replacement=False, generator=source).tolist():
                following.append((tree.add(child, parent), child))
        level = following
    return tree


def written(
    rule: Rule,
    draft: Callable[[int, torch.Generator], Tree],
    target: torch.Tensor,
    options: GenerationOptions,
    draws: int,
    length: int,
) -> Counter[tuple[int, ...]]:
    """The first `length` tokens of many texts, written round by round from what `draft` says may follow the last token."""
    source = torch.Generator().manual_seed(5)
    found: Counter[tuple[int, ...]] = Counter()
    for _ in range(draws):
        text = [0]
        while len(text) <= length:
            tree = draft(text[-1], source)
            logits = target[torch.tensor([text[-1], *tree.tokens])]
            verdict = rule.accept(tree, TargetLogits(logits, options, source))
            text += [*(tree.tokens[node] for node in verdict.path), verdict.token]
        found[tuple(text[1 : 1 + length])] += 1
    return found


def expected(target: torch.Tensor, options: GenerationOptions, length: int) -> dict[tuple[int, ...], float]:
    """How likely plain decoding writes each text after token 0."""
    rows = [softmax(row, options).tolist() for row in target]
    chances = {}
    for text in itertools.product(range(len(rows)), repeat=length):
        chance = 1.0
        for before, token in zip((0, *text), text, strict=False):
            chance *= rows[before][token]
        chances[text] = chance
    return chances


def misfit(found: Counter[tuple[int, ...]], chances: dict[tuple[int, ...], float]) -> float:
    """Pearson's statistic over cells of at least 5 expected counts (the rest is one cell): the normal quantile that is as unlikely.

    Its own tail is longer than a normal one: with 40 cells it is 4.5 standard deviations above its mean in one of 5,000 right tests.
    """
    draws = sum(found.values())
    rest_found, rest_expected, statistic, cells = 0.0, 0.0, 0.0, 0
    for key, chance in chances.items():
        want = chance * draws
        if want < 5:
            rest_found, rest_expected = rest_found + found[key], rest_expected + want
            continue
        statistic += (found[key] - want) ** 2 / want
        cells += 1
    if rest_expected > 5:
        statistic += (rest_found - rest_expected) ** 2 / rest_expected
        cells += 1
    half = torch.tensor([(cells - 1) / 2, statistic / 2], dtype=torch.float64)
    return -float(torch.special.ndtri(torch.special.gammaincc(*half)))


def accepted_in_drawn_texts(plain: Any, drafting: Any, prompt: list[int], count: int) -> int:
    """Fails unless the second and third token of `count` texts of a drafting model are distributed as those of plain decoding (the first
    comes from the prompt alone, and not from a draft); how many drafted tokens these texts took.
    """
    options, found, accepted = GenerationOptions(temperature=0.8, top_k=4), Counter[tuple[int, ...]](), 0
    for _ in range(0, count, 250):
        for text in drafting.generate([prompt] * 250, max_new_tokens=4, temperature=0.8, top_k=4, ignore_eos=True):
            found[tuple(text[1:3])] += 1
        accepted += drafting.stats["accepted_tokens"]

    def chances(text: list[int]) -> list[tuple[int, float]]:
        p = softmax(plain.logits([text])[0, -1], options)
        return [(int(token), float(p[token])) for token in p.nonzero()[:, 0]]

    exact: dict[tuple[int, ...], float] = {}
    for first, a in chances(prompt):
        for second, b in chances([*prompt, first]):
            for third, c in chances([*prompt, first, second]):
                exact[second, third] = exact.get((second, third), 0.0) + a * b * c
    assert sum(found.values()) == count
    assert set(found) <= set(exact)
    assert misfit(found, exact) < 4.5
    return accepted
