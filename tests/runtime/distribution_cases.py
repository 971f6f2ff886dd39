"""Texts of many rounds of drafting and verifying, over tables for models, against the probabilities of the target."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable

import torch

from runtime.decoding.options import GenerationOptions
from runtime.decoding.sampling import process
from runtime.decoding.tree import ROOT, Tree
from runtime.decoding.verify.base import Rule
from runtime.decoding.verify.target import Target


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
            verdict = rule.accept(tree, Target(logits, options, source))
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
    """Pearson's statistic over cells of at least 5 expected counts (the rest is one cell), in standard deviations above its mean."""
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
    return (statistic - (cells - 1)) / (2 * (cells - 1)) ** 0.5
