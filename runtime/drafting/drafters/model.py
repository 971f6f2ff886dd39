"""Draft models: a smaller model drafts token after token, all sequences of a step together."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch

from runtime.config.settings import ConfigError, Count, Natural, Probability, built, read
from runtime.drafting.config.target import Target, UnfitError
from runtime.drafting.draft_cache import AheadDraftCache, DraftCache, Slot, draft_cache_of
from runtime.drafting.drafters.base import Ask, Drafter, Draw, Text
from runtime.drafting.drafters.draft_model import DRAFT, DraftModel, load_draft
from runtime.drafting.guard import within
from runtime.errors import ArtifactError
from runtime.sampling.sampling import process, seen_tokens
from runtime.sampling.tree import Tree

_log = logging.getLogger("compress.speculation")


class Candidates:
    """From a draft's logits to tokens of the target.

    Args:
        vocabulary: of the target.
        kept: int64 `[draft's vocabulary]`, the target's id of each of the draft's tokens; None: they are the same (a draft with more
            tokens than the target, as of padded embeddings, proposes none of them).
    """

    def __init__(self, vocabulary: int, kept: torch.Tensor | None = None) -> None:
        self.vocabulary, self._kept = vocabulary, kept

    def best(self, logits: torch.Tensor, count: int) -> tuple[list[list[int]], list[list[float]]]:
        """The `count` likeliest tokens of each row of float32 `[rows, draft's vocabulary]`, and their probabilities."""
        logits = logits[:, : self.vocabulary] if self._kept is None else logits
        values, ids = torch.topk(logits, min(count, logits.shape[1]), dim=-1)
        chances = torch.exp(values - torch.logsumexp(logits, -1, keepdim=True))
        if self._kept is not None:
            ids = self._kept[ids.cpu()]
        return ids.tolist(), chances.tolist()

    def distribution(self, logits: torch.Tensor, draw: Draw, before: Sequence[int]) -> torch.Tensor:
        """What to draw from after one row `[draft's vocabulary]`, float32 `[vocabulary]` on the CPU, with the options of the call.

        Args:
            before: tokens of the text and of the branch, for the repetition penalty.
        """
        row = logits.float().cpu()
        if self._kept is not None:
            whole = row.new_full((self.vocabulary,), float("-inf"))
            whole[self._kept] = row
            row = whole
        elif row.shape[0] < self.vocabulary:
            row = torch.cat([row, row.new_full((self.vocabulary - row.shape[0],), float("-inf"))])
        row = row[: self.vocabulary][None]
        seen = None
        if draw.options.repetition_penalty != 1.0:
            seen = seen_tokens(before, row)[None]
        return torch.softmax(process(row, seen, draw.options)[0], -1)

    @staticmethod
    def draw(q: torch.Tensor, draw: Draw, count: int = 1) -> list[int]:
        """Up to `count` tokens, one after another without replacement."""
        count = min(count, int((q > 0).sum()))
        return torch.multinomial(q, count, replacement=False, generator=draw.generator).tolist()


_FAR = 16  # tokens; a slot that is further behind (nothing was drafted for a while) is brought up to date apart from the draft
_RECENT = 256  # tokens that are compared one by one


class FromDraft(Drafter):
    """Drafter over a draft model, which its directory holds."""

    source: ClassVar[str] = "model"
    draws = True

    @classmethod
    def build(cls, target: Target, directory: Path, facts: Mapping[str, Any], **settings: Any) -> Drafter:
        draft = target.drafts.get(str(directory))
        if draft is None:
            draft = load_draft(directory, target.artifact, target.engine.device, target.trust_remote_code)
        candidates = Candidates(target.engine.vocab_size, draft.kept)
        try:
            drafter = cls.over(draft, directory, candidates, **settings)
        except UnfitError as error:
            if not target.lenient:
                raise
            _log.warning("the draft %s is used as a chain: %s", directory, error.text)
            drafter = ModelDrafter.over(draft, directory, candidates)
        return within(drafter, draft, target.engine.context_length)

    @classmethod
    def over(cls, draft: DraftModel, directory: Path, candidates: Candidates, **settings: Any) -> Drafter:
        """The drafter over a loaded draft model; see `build` for what it raises."""
        return cls(cache=draft_cache_of(draft.engine), candidates=candidates, weights=draft.weight_bytes, **settings)  # type: ignore[call-arg]


@dataclass(eq=False)
class ModelDrafter(FromDraft):
    """A chain of tokens from a smaller causal language model of the same vocabulary.

    Source: Leviathan et al., Fast Inference from Transformers via Speculative Decoding, arXiv 2211.17192; Chen et al., arXiv 2302.01318.

    Attributes:
        cache: of the draft model.
        candidates: from its logits to tokens of the target.
        confidence: a chain ends with a token that the draft gives less than this probability; 0: never. The target verifies that token as
            any other (acceptance "rollback" has BiLD's fallback, where it does not count).
        weights: bytes of the draft's weights that the target does not have.
    """

    name: ClassVar[str] = "chain"

    cache: DraftCache = built()
    candidates: Candidates = built()
    confidence: Probability = 0.0
    weights: int = built(0)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.vocabulary = self.candidates.vocabulary

    def begin(self, text: Text) -> Slot:
        return self.cache.open()

    def end(self, state: Slot) -> None:
        self.cache.close(state)

    @property
    def memory_bytes(self) -> int:
        return self.weights + self.cache.nbytes

    def draft(self, asks: Sequence[Ask]) -> list[Tree]:
        logits = self.start(asks)
        trees = [Tree() for _ in asks]
        reach = [1.0] * len(asks)
        alive = list(range(len(asks)))
        while True:
            following = []
            for row, index in enumerate(alive):
                ask, tree = asks[index], trees[index]
                token, chance = self.choose(logits[row], ask, tree)
                tree.add(token, len(tree) - 1, chance)
                reach[index] *= chance
                sure = chance >= self.confidence and reach[index] >= ask.least
                if sure and len(tree) < min(ask.nodes, ask.depth):
                    following.append(index)
            if not following:
                return trees
            alive = following
            logits = self.cache.feed(
                [asks[index].state for index in alive], [trees[index].tokens[-1:] for index in alive]
            )

    def choose(self, logits: torch.Tensor, ask: Ask, tree: Tree) -> tuple[int, float]:
        """The next token of a chain, and how likely it is; what it is drawn from goes into the tree."""
        if ask.draw is None:
            tokens, chances = self.candidates.best(logits[None], 1)
            return tokens[0][0], chances[0][0]
        q = self.candidates.distribution(logits, ask.draw, [*ask.text.tokens, *tree.tokens])
        (token,) = self.candidates.draw(q, ask.draw)
        tree.proposals[len(tree) - 1] = q
        return token, float(q[token])

    # ---------------------------------------------------------------- the text so far
    def start(self, asks: Sequence[Ask]) -> torch.Tensor:
        """Logits after the texts, `[asks, vocab]`; what of them was not read is read."""
        return self.cache.feed([ask.state for ask in asks], self.missing(asks))

    def missing(self, asks: Sequence[Ask]) -> list[list[int]]:
        """What of each text was not read yet, at least its last token. What is more than a few tokens is read here."""
        self.overhead = self.read_far([ask.state for ask in asks], [ask.text.tokens for ask in asks])
        missing = []
        for ask in asks:
            self.cache.cut(ask.state, _common(ask.state.tokens, ask.text.tokens[:-1]))
            missing.append(ask.text.tokens[len(ask.state.tokens) :])
        return missing

    def read_far(self, slots: Sequence[Slot], texts: Sequence[Sequence[int]]) -> float:
        """Read all but the last token of those texts of which much is missing, such as a prompt; returns the seconds that it took."""
        far = [
            (slot, text[:-1]) for slot, text in zip(slots, texts, strict=True) if len(text) - len(slot.tokens) > _FAR
        ]
        started = time.perf_counter()
        if far:
            self.catch_up([slot for slot, _ in far], [text for _, text in far])
        return time.perf_counter() - started

    def catch_up(self, slots: Sequence[Slot], texts: Sequence[Sequence[int]]) -> None:
        """See to it that each slot holds exactly its text."""
        for slot, tokens in zip(slots, texts, strict=True):
            self.cache.cut(slot, _common(slot.tokens, tokens))
        behind = [(slot, rest) for slot, text in zip(slots, texts, strict=True) if (rest := text[len(slot.tokens) :])]
        if behind:
            self.cache.feed([slot for slot, _ in behind], [rest for _, rest in behind])


def _common(held: Sequence[int], tokens: Sequence[int]) -> int:
    """Length of the common beginning, nearly always nearly all: both are compared from the end of the shorter one's recent part on."""
    length = min(len(held), len(tokens))
    start = max(0, length - _RECENT)
    if held[:start] != tokens[:start]:
        start = 0
    return next((place for place in range(start, length) if held[place] != tokens[place]), length)


# A draft model proposes several tokens in one pass: mask tokens stand where the text has not come yet.


@dataclass(eq=False)
class Parallel(ModelDrafter):
    """The draft reads the text's last token and then mask tokens, and what it says after each is the next token of the chain. A drafted
    token does not see those before it, which costs acceptance, and all of them cost one pass.

    Source: An et al., PARD: Accelerating LLM Inference with Low-Cost PARallel Draft Model Adaptation, arXiv 2504.18583.

    Attributes:
        mask_token: id that it was trained to read in the place of tokens not known yet.
        most: tokens that it was trained to propose at once.
    """

    name: ClassVar[str] = "parallel"
    fact: ClassVar[str | None] = "parallel"
    cache: AheadDraftCache = built()
    mask_token: int = built(0)
    most: int = built(8)

    @classmethod
    def over(cls, draft: DraftModel, directory: Path, candidates: Candidates, **settings: Any) -> Drafter:
        facts = draft.facts.get(cls.name)
        if not isinstance(facts, Mapping):
            raise ConfigError(("method",), f"{directory} was not trained to propose several tokens at once; use chain")
        try:
            mask = read(Natural, facts.get("mask_token"), ("mask_token",))
            most = read(Count, facts.get("tokens"), ("tokens",))
        except ConfigError as error:
            raise ArtifactError(str(error.at(f"{directory / DRAFT}: {cls.name}"))) from None
        return super().over(draft, directory, candidates, mask_token=mask, most=most, **settings)

    def draft(self, asks: Sequence[Ask]) -> list[Tree]:
        missing = self.missing(asks)
        masks = [[self.mask_token] * (min(ask.nodes, ask.depth, self.most) - 1) for ask in asks]
        logits = self.cache.ahead([ask.state for ask in asks], missing, masks)
        trees = []
        for ask, rows in zip(asks, logits, strict=True):
            tree, reach = Tree(), 1.0
            for row in rows:
                token, chance = self.choose(row, ask, tree)
                tree.add(token, len(tree) - 1, chance)
                reach *= chance
                if chance < self.confidence or reach < ask.least:
                    break
            trees.append(tree)
        return trees
