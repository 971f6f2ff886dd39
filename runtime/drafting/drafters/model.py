"""Draft models: a smaller model drafts token after token, all sequences of a step together."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import torch

from runtime.config.settings import ConfigError, Count, Natural, Probability, built
from runtime.drafting.config.target import Target, UnfitError
from runtime.drafting.draft_cache import DraftCache, Slot, draft_cache_of
from runtime.drafting.drafters.base import Ask, Drafter, Draw, Text
from runtime.drafting.drafters.composition import within
from runtime.drafting.drafters.draft_model import DraftModel, load_draft, read_fact
from runtime.sampling.sampling import process, seen_tokens
from runtime.sampling.tree import ROOT, Tree

_log = logging.getLogger("compress.speculation")


class Candidates:
    """From a draft's logits to tokens of the target.

    Args:
        vocabulary: of the target.
        kept: int64 `[draft's vocabulary]`, the target's id of each of the draft's tokens; None: they are the same (a draft with more
            tokens than the target, as of padded embeddings, proposes none of them).
    """

    def __init__(self, vocabulary: int, kept: torch.Tensor | None = None) -> None:
        self.vocabulary, self.kept = vocabulary, kept

    def best(self, logits: torch.Tensor, count: int) -> tuple[list[list[int]], list[list[float]]]:
        """The `count` likeliest tokens of each row of float32 `[rows, draft's vocabulary]`, and their probabilities."""
        logits = logits[:, : self.vocabulary] if self.kept is None else logits
        values, ids = torch.topk(logits, min(count, logits.shape[1]), dim=-1)
        chances = torch.exp(values - torch.logsumexp(logits, -1, keepdim=True))
        if self.kept is not None:
            ids = self.kept[ids.cpu()]
        return ids.tolist(), chances.tolist()

    def distribution(self, logits: torch.Tensor, draw: Draw, before: Sequence[int]) -> torch.Tensor:
        """What to draw from after one row `[draft's vocabulary]`, float32 `[vocabulary]` on the CPU, with the options of the call.

        Args:
            before: tokens of the sequence and of the branch, for the repetition penalty.
        """
        own = logits.float().cpu()[: self.vocabulary]
        row = own.new_full((1, self.vocabulary), float("-inf"))
        row[0, slice(len(own)) if self.kept is None else self.kept] = own
        seen = None if draw.options.repetition_penalty == 1.0 else seen_tokens(before, row)[None]
        return torch.softmax(process(row, seen, draw.options)[0], -1)

    def next(self, logits: torch.Tensor, chain: Chain) -> tuple[int, float]:
        """The next token of a chain, and how likely it is; the distribution that it is drawn from goes into the chain's tree."""
        found = self.next_if_sure(logits, chain, 0.0)
        assert found is not None
        return found

    def next_if_sure(self, logits: torch.Tensor, chain: Chain, sure: float) -> tuple[int, float] | None:
        """As `next`; None, with nothing drawn, where no token has a probability of `sure`."""
        ask, tree = chain.ask, chain.tree
        if ask.draw is None:
            tokens, chances = self.best(logits[None], 1)
            return (tokens[0][0], chances[0][0]) if chances[0][0] >= sure else None
        q = self.distribution(logits, ask.draw, [*ask.text.tokens, *tree.tokens])
        if sure and float(q.max()) < sure:
            return None
        (token,) = self.draw(q, ask.draw)
        tree.proposals[chain.last] = q
        return token, float(q[token])

    @staticmethod
    def draw(q: torch.Tensor, draw: Draw, count: int = 1) -> list[int]:
        """Up to `count` tokens, one after another without replacement."""
        count = min(count, int((q > 0).sum()))
        return torch.multinomial(q, count, replacement=False, generator=draw.generator).tolist()


@dataclass(eq=False)
class Chain:
    """The chain of tokens that is drafted for an ask.

    Attributes:
        reach: how likely all of its tokens are right.
        last: node at which it goes on. length: tokens of it.
    """

    ask: Ask
    tree: Tree = field(default_factory=Tree)
    reach: float = 1.0
    last: int = ROOT
    length: int = 0

    @property
    def room(self) -> int:
        """Tokens that may still be added."""
        return min(self.ask.nodes, self.ask.depth) - self.length

    def add(self, token: int, chance: float, confidence: float = 0.0) -> bool:
        """Add a token of this probability; whether the chain goes on after it."""
        self.last = self.tree.add(token, self.last, chance)
        self.length += 1
        self.reach *= chance
        return chance >= confidence and self.reach >= self.ask.least and self.room > 0


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
        return within(drafter, draft, target.engine)

    @classmethod
    def over(cls, draft: DraftModel, directory: Path, candidates: Candidates, **settings: Any) -> Drafter:
        """The drafter over a loaded draft model; see `build` for what it raises."""
        return cls(
            cache=draft_cache_of(draft.engine), candidates=candidates, weights=draft.engine.weight_bytes, **settings
        )  # type: ignore[call-arg]


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
        return Slot()

    def end(self, state: Slot) -> None:
        self.cache.close(state)

    @property
    def memory_bytes(self) -> int:
        return self.weights + self.cache.nbytes

    def draft(self, asks: Sequence[Ask]) -> list[Tree]:
        chains = [Chain(ask) for ask in asks]
        alive, logits = chains, self.start(asks)
        while True:
            tokens = self.choose(alive, logits)
            alive = [
                chain
                for chain, (token, chance) in zip(alive, tokens, strict=True)
                if chain.add(token, chance, self.confidence)
            ]
            if not alive:
                return [chain.tree for chain in chains]
            logits = self.cache.feed([chain.ask.state for chain in alive], [chain.tree.tokens[-1:] for chain in alive])

    def choose(self, chains: Sequence[Chain], logits: torch.Tensor) -> list[tuple[int, float]]:
        """The next token of each chain and how likely it is; logits `[chains, vocab]`."""
        return [self.candidates.next(row, chain) for chain, row in zip(chains, logits, strict=True)]

    # ---------------------------------------------------------------- the sequence so far
    def start(self, asks: Sequence[Ask]) -> torch.Tensor:
        """Logits after the sequences, `[asks, vocab]`; what of them was not read is read."""
        return self.cache.feed([ask.state for ask in asks], self.missing(asks))

    def missing(self, asks: Sequence[Ask]) -> list[list[int]]:
        """The tokens of each sequence that were not read yet, at least the last one. More than a few are read here."""
        self.overhead = self.read_far([ask.state for ask in asks], [ask.text.tokens for ask in asks])
        missing = []
        for ask in asks:
            del ask.state.tokens[_common(ask.state.tokens, ask.text.tokens[:-1]) :]
            missing.append(ask.text.tokens[len(ask.state.tokens) :])
        return missing

    def read_far(self, slots: Sequence[Slot], sequences: Sequence[Sequence[int]]) -> float:
        """Read all but the last token of sequences of which much is missing, such as a prompt; returns the seconds that it took."""
        far = [
            (slot, tokens[:-1])
            for slot, tokens in zip(slots, sequences, strict=True)
            if len(tokens) - len(slot.tokens) > _FAR
        ]
        started = time.perf_counter()
        if far:
            self.catch_up([slot for slot, _ in far], [tokens for _, tokens in far])
        return time.perf_counter() - started

    def catch_up(self, slots: Sequence[Slot], sequences: Sequence[Sequence[int]]) -> None:
        """Let each slot hold exactly its sequence."""
        behind = []
        for slot, tokens in zip(slots, sequences, strict=True):
            del slot.tokens[_common(slot.tokens, tokens) :]
            if len(tokens) > len(slot.tokens):
                behind.append((slot, tokens[len(slot.tokens) :]))
        if behind:
            self.cache.feed([slot for slot, _ in behind], [rest for _, rest in behind])


def _common(held: Sequence[int], tokens: Sequence[int]) -> int:
    """Length of the common prefix. It nearly always covers most of both, so all but the recent tokens is compared as a slice first."""
    length = min(len(held), len(tokens))
    start = max(0, length - _RECENT)
    if held[:start] != tokens[:start]:
        start = 0
    return next((place for place in range(start, length) if held[place] != tokens[place]), length)


@dataclass(eq=False)
class Parallel(ModelDrafter):
    """The draft reads the last token and then mask tokens, and what it says after each is the next token of the chain. A drafted
    token does not see those before it, which costs acceptance, and all of them cost one pass.

    Source: An et al., PARD: Accelerating LLM Inference with Low-Cost PARallel Draft Model Adaptation, arXiv 2504.18583.

    Attributes:
        mask_token: id that it was trained to read in the place of tokens not known yet.
        most: tokens that it was trained to propose at once.
    """

    name: ClassVar[str] = "parallel"
    fact: ClassVar[str | None] = "parallel"
    mask_token: int = built(0)
    most: int = built(8)

    @classmethod
    def over(cls, draft: DraftModel, directory: Path, candidates: Candidates, **settings: Any) -> Drafter:
        if not isinstance(draft.facts.get(cls.name), Mapping):
            raise ConfigError(("method",), f"{directory} was not trained to propose several tokens at once; use chain")
        mask = read_fact(directory, draft.facts, Natural, cls.name, "mask_token")
        most = read_fact(directory, draft.facts, Count, cls.name, "tokens")
        return super().over(draft, directory, candidates, mask_token=mask, most=most, **settings)

    def draft(self, asks: Sequence[Ask]) -> list[Tree]:
        chains = [Chain(ask) for ask in asks]
        masks = [[self.mask_token] * (min(chain.room, self.most) - 1) for chain in chains]
        logits = self.cache.ahead([ask.state for ask in asks], self.missing(asks), masks)
        for chain, rows in zip(chains, logits, strict=True):
            for row in rows:
                if not chain.add(*self.candidates.next(row, chain), self.confidence):
                    break
        return [chain.tree for chain in chains]
