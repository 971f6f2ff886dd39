"""Medusa: heads on the target guess several tokens ahead, each by itself; a tree holds the combinations that are likely."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, Literal

import torch
from annotated_types import Interval
from torch import nn
from torch.nn import functional

from runtime.config.settings import Count, Natural, built
from runtime.drafting.drafters.base import Ask, Text, Verified
from runtime.drafting.drafters.heads import HeadDrafter, HeadFiles, TargetParts
from runtime.drafting.drafters.tables.growth import Candidate, Shapes, grow_levels
from runtime.drafting.drafters.tables.odds import Guesses, Odds
from runtime.drafting.rates import Rates
from runtime.sampling.tree import Tree


class MedusaHead(nn.Module):
    """Residual blocks x + SiLU(W x + b), then a linear map; all zero (the map: the identity) they change nothing.

    The head's own vocabulary projection is the map followed by the target's head, which all heads share: a projection of the rank of
    the hidden size that takes hidden^2 numbers, where one by itself takes vocabulary * hidden (32k tokens, hidden 2048: a sixteenth).
    """

    def __init__(self, hidden: int, blocks: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(hidden, hidden) for _ in range(blocks))
        self.out = nn.Linear(hidden, hidden, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Logits of the head, `[..., vocab]`, from hidden states `[..., hidden]`."""
        for block in self.blocks:
            x = x + functional.silu(block(x))
        return self.out(x)


class MedusaHeads(nn.Module):
    """Some heads, the k-th (from 1) for the token k + 1 positions after the one whose hidden state is read.

    Source: Cai et al., Medusa, arXiv 2401.10774.

    Args:
        hidden: width of the states.
        heads: how many.
        blocks: residual blocks of each.
    """

    def __init__(self, hidden: int, heads: int, blocks: int = 1) -> None:
        super().__init__()
        self.heads = nn.ModuleList(MedusaHead(hidden, blocks) for _ in range(heads))

    def forward(self, states: torch.Tensor, count: int | None = None) -> torch.Tensor:
        """States `[..., hidden]` to what the target's head reads for each of the first `count` heads, `[count, ..., hidden]`."""
        return torch.stack([head(states) for head in self.heads[:count]])

    @torch.no_grad()
    def begin(self) -> None:
        """Weights to train from: every head says what the target's own does."""
        for head in self.heads:
            for block in head.blocks:  # type: ignore[union-attr]
                nn.init.zeros_(block.weight)
                nn.init.zeros_(block.bias)
            nn.init.eye_(head.out.weight)  # type: ignore[union-attr,arg-type]


_WEIGHT, _MEMORY = 64.0, 1024.0  # guesses that the measured rates count as, and after which older ones count less
_MOST_LOGITS = 1 << 24  # in memory at once; more sequences are drafted for one part after another


@dataclass(eq=False)
class Medusa(HeadDrafter):
    """From the hidden state that chose the last token, head k guesses the token k places after it. The likeliest guesses of each
    head are combined into a tree: every path is a candidate, as heads do not know of each other. Guesses are what the tree holds under
    sampling too; they are exact then as well.

    Source: Cai et al., Medusa: Simple LLM Inference Acceleration Framework with Multiple Decoding Heads, arXiv 2401.10774.

    Attributes:
        start: how often guesses are right by depth and rank, as measured after training.
        width: guesses of each head.
        shape: which of the combinations a tree holds: "fitted", those whose ranks were right most often, the paper's fixed tree (made anew
            now and then, as rates are learned); "likeliest", those that the heads now give most, corrected by how often each rank is right.
        refit: verified steps after which a fitted shape is made anew.
    """

    name: ClassVar[str] = "medusa"
    wants = frozenset(["hidden"])

    start: Sequence[Sequence[float]] = built()
    width: Annotated[int, Interval(ge=1, le=64)] = 8
    shape: Literal["likeliest", "fitted"] = "likeliest"
    refit: Count = 64

    @classmethod
    def skeleton(cls, files: HeadFiles, parts: TargetParts) -> tuple[nn.Module, dict[str, Any]]:
        count = files.size("count")
        heads = MedusaHeads(parts.hidden, count, files.size("blocks", Natural))
        return heads, {"start": files.rates(count)}

    def __post_init__(self) -> None:
        super().__post_init__()
        self._rates = Rates(_WEIGHT, memory=_MEMORY)
        self._odds = Odds()
        depths = len(self.start)
        self._shapes = Shapes(self.refit, self._odds, self.width, depths, lambda count: self.rates()[:count])

    def reset(self) -> None:
        self._rates.reset()
        self._odds.reset()
        self._shapes.reset()

    def begin(self, text: Text) -> Any:
        return _State()

    # ---------------------------------------------------------------- guesses
    @torch.inference_mode()
    def draft(self, asks: Sequence[Ask]) -> list[Tree]:
        trees = [Tree() for _ in asks]
        known = [index for index, ask in enumerate(asks) if ask.state.length == len(ask.text.tokens)]
        depth = min(len(self.start), max((ask.depth for ask in asks), default=0))
        together = max(1, _MOST_LOGITS // (max(1, depth) * self.candidates.vocabulary))
        for first in range(0, len(known), together):
            part = known[first : first + together]
            self._guess([asks[index].state for index in part], depth)
            for index in part:
                trees[index] = self._tree(asks[index])
        return trees

    def _guess(self, states: Sequence[_State], depth: int) -> None:
        """The likeliest tokens of every head, for all sequences in one pass."""
        hidden = torch.stack([state.hidden for state in states]).to(self.parts.device, self.parts.dtype)
        ahead = self.module(hidden, depth).flatten(0, 1)
        tokens, chances = self.candidates.best(self.parts.logits(ahead), self.width)
        for place, state in enumerate(states):
            state.tokens = tokens[place :: len(states)]
            state.chances = chances[place :: len(states)]
            state.guessed = state.length

    def _tree(self, ask: Ask) -> Tree:
        state: _State = ask.state
        guesses = [list(zip(*each, strict=True)) for each in zip(state.tokens, state.chances, strict=True)]
        if self.shape == "likeliest":
            levels: list[list[Candidate[None]]] = [
                [
                    (token, self._odds.chance(kind, chance), kind, chance, None)
                    for kind, (token, chance) in enumerate(ranks, depth * self.width)
                ]
                for depth, ranks in enumerate(guesses)
            ]
            return grow_levels(levels, ask.nodes, ask.depth, ask.least).tree

        def choose(_found: Guesses, _above: int, rank: int, kind: int) -> tuple[int, float] | None:
            ranks = guesses[kind // self.width]
            return ranks[rank] if rank < len(ranks) else None

        return self._shapes.fill(ask.nodes, ask.depth, ask.least, choose).tree

    def rates(self) -> list[list[float]]:
        """How often guesses are right by depth and rank, `width` of each depth."""
        return [
            [self._rates.rate(depth * self.width + rank, start) for rank, start in enumerate(ranks)]
            for depth, ranks in enumerate(widened(self.start, self.width))
        ]

    # ---------------------------------------------------------------- what became of them
    def note(self, state: _State, verified: Verified, hidden: torch.Tensor) -> None:
        text = verified.text.tokens
        if state.guessed == len(text) - len(verified.new):
            self._settle(state, verified.new)
        state.hidden = hidden[verified.row].clone()
        state.length, state.guessed = len(text), -1

    def _settle(self, state: _State, new: Sequence[int]) -> None:
        """Each head is right or wrong where those before it were right, whether the tree held its guess or not."""
        for depth, (token, tokens, chances) in enumerate(zip(new, state.tokens, state.chances, strict=False)):
            for rank, (guess, chance) in enumerate(zip(tokens, chances, strict=True)):
                self._rates.add(depth * self.width + rank, guess == token)
                self._odds.count(depth * self.width + rank, chance, guess == token)
            if token not in tokens:
                break
        self._shapes.step()

    def describe(self) -> str:
        return f"{self.name} ({len(self.start)} heads)"


@dataclass(eq=False)
class _State:
    """One sequence.

    Attributes:
        hidden: `[hidden]`, that chose its last token.
        length: of the sequence then; -1: nothing was verified yet.
        tokens, chances: of each head, the likeliest first, as last guessed.
        guessed: length of the sequence for which they were; -1: that is settled.
    """

    hidden: torch.Tensor = field(default_factory=lambda: torch.empty(0))
    length: int = -1
    tokens: list[list[int]] = field(default_factory=list)
    chances: list[list[float]] = field(default_factory=list)
    guessed: int = -1


def widened(rates: Sequence[Sequence[float]], width: int) -> list[list[float]]:
    """Rates of `width` ranks a depth; each that was not measured is half of the one before."""
    found = []
    for ranks in rates:
        row = list(ranks[:width]) or [0.5]
        while len(row) < width:
            row.append(row[-1] / 2)
        found.append(row)
    return found
