"""Models and drafters for tests of speculative decoding."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from llama_engines import engines, model_of

from runtime.api.model import Model
from runtime.drafting.drafters.base import Ask, Drafter, Verified
from runtime.drafting.drafters.confident import AcceptHead
from runtime.drafting.lengths.base import Lengths
from runtime.drafting.lengths.fixed import Fixed
from runtime.drafting.speculation import Speculation
from runtime.drafting.verify.base import Rule
from runtime.drafting.verify.exact import Exact
from runtime.sampling.tree import ROOT, Tree

VOCABULARY = 400
FINGERPRINT = "0123"


def model(speculation: Speculation | None = None, name: str = "grouped", **changes: Any) -> Model:
    """A tiny random Llama in C, with no tokenizer."""
    _, lean = engines(model_of(name, **changes))
    return model_over(lean, speculation)


def prompts(count: int, longest: int = 40, seed: int = 0) -> list[list[int]]:
    draw = random.Random(seed)
    return [[draw.randrange(4, VOCABULARY) for _ in range(draw.randint(1, longest))] for _ in range(count)]


def speculation(drafter: Drafter, lengths: Lengths | None = None, rule: Rule | None = None) -> Speculation:
    return Speculation(drafter, rule or Exact(), lengths or Fixed(depth=6, nodes=12))


class Scripted(Drafter):
    """Knows what will be written and proposes trees around it, with the truth at a random place and, at times, not at all.

    Args:
        answers: {prompt: what follows it}.
        right: how often a token is the true one.
        branches: most siblings.
    """

    name = "scripted"

    def __init__(self, answers: dict[tuple[int, ...], list[int]], right: float = 0.8, branches: int = 3) -> None:
        self._answers, self._right, self._branches = answers, right, branches
        self._random = random.Random(0)
        self.begun = self.ended = 0
        self.verified: list[Verified] = []

    @property
    def watched(self) -> bool:
        return False

    def begin(self, text: Any) -> Any:
        self.begun += 1
        return tuple(text.tokens[: text.prompt])

    def draft(self, asks: Sequence[Ask]) -> list[Tree]:
        return [self._tree(ask) for ask in asks]

    def _tree(self, ask: Ask) -> Tree:
        tree, draw = Tree(), self._random
        truth = self._answers[ask.state][len(ask.text.tokens) - ask.text.prompt :]
        levels = [ROOT]
        for depth in range(min(ask.depth, len(truth))):
            following = []
            for parent in levels:
                tokens = draw.sample(range(4, VOCABULARY), draw.randint(1, self._branches))
                if draw.random() < self._right:
                    tokens = [token for token in tokens if token != truth[depth]]
                    tokens.insert(draw.randint(0, len(tokens)), truth[depth])
                for token in tokens:
                    if len(tree) < ask.nodes:
                        following.append(tree.add(token, parent))
            levels = following[:4]
            draw.shuffle(levels)
        return tree

    def learn(self, state: Any, verified: Verified) -> None:
        assert verified.text.tokens[-len(verified.new) :] == list(verified.new)
        assert verified.logits.shape[0] == 1 + len(verified.tree)
        self.verified.append(verified)

    def end(self, state: Any) -> None:
        self.ended += 1


def answers(plain: Model, texts: Sequence[list[int]], **options: Any) -> dict[tuple[int, ...], list[int]]:
    """What plain decoding writes."""
    return {tuple(text): new for text, new in zip(texts, plain.generate(list(texts), **options), strict=True)}


def trees_change_nothing(make: Callable[[], Model], texts: Sequence[list[int]], new: int) -> None:
    """Trees that are often wrong: what models that `make` gives write is what plain ones do, in fewer steps."""
    plain, drafting = make(), make()
    truth = answers(plain, texts, max_new_tokens=new)
    drafting.speculation = speculation(Scripted(truth))
    assert drafting.generate(list(texts), max_new_tokens=new) == list(truth.values())
    assert drafting.stats["steps"] < plain.stats["steps"]


def accept_head(hidden: int) -> AcceptHead:
    """One that foresees what the draft says itself: the logit is the token's log-probability and 2."""
    out = torch.zeros(2, hidden + 2)
    out[:, hidden] = 1.0
    tensors = {"mix": torch.zeros(hidden, hidden), "mix_bias": torch.zeros(hidden), "out": out}
    return AcceptHead({**tensors, "out_bias": torch.full((2,), 2.0)})


# ---------------------------------------------------------------- engines of all kinds
def model_over(
    engine: Any,
    speculation: Speculation | None = None,
    eos: Sequence[int] = (3,),
    tokenizer: Any = None,
    prefix_cache: int | None = None,
) -> Model:
    """A model around an engine, without a directory."""
    artifact: Any = SimpleNamespace(path=Path("tiny"), checkpoint=SimpleNamespace(fingerprint=lambda: FINGERPRINT))
    return Model(engine, tokenizer, artifact, frozenset(eos), speculation, prefix_cache=prefix_cache)


class ScriptedChain(Scripted):
    """As `Scripted`, without alternatives: a token is the true one as often as `right` says, and what comes after a wrong one is true."""

    def _tree(self, ask: Ask) -> Tree:
        truth = self._answers[ask.state][len(ask.text.tokens) - ask.text.prompt :][: min(ask.depth, ask.nodes)]
        wrong = [self._random.randrange(4, VOCABULARY) for _ in truth]
        pairs = zip(truth, wrong, strict=True)
        return Tree.chain([one if self._random.random() < self._right else other for one, other in pairs])


class Reading(Scripted):
    """As `Scripted`, and it keeps the hidden states of prompts: {prompt: pieces}."""

    wants = frozenset(["hidden", "prompt"])

    def begin(self, text: Any) -> Any:
        self.states: dict[Any, list[torch.Tensor]] = getattr(self, "states", {})
        self.states[tuple(text.tokens[: text.prompt])] = []
        return super().begin(text)

    def read(self, state: Any, start: int, tokens: Any, hidden: torch.Tensor) -> None:
        assert start == sum(map(len, self.states[state]))
        assert tuple(tokens) == state[start : start + len(tokens)]
        assert len(tokens) == len(hidden)
        self.states[state].append(hidden)


@torch.inference_mode()
def assert_states_are_read_by(head: Any, plain: Model, drafter: Reading, tolerance: float = 1e-3) -> None:
    """Of hidden states the head makes the logits that came with them, and those of prompts."""
    for verified in drafter.verified:
        assert verified.hidden is not None
        torch.testing.assert_close(head(verified.hidden), verified.logits, atol=tolerance, rtol=tolerance)
    assert drafter.states
    for prompt, hidden in drafter.states.items():
        logits = plain.logits([list(prompt)])[0]
        torch.testing.assert_close(head(torch.cat(hidden)), logits, atol=tolerance, rtol=tolerance)
