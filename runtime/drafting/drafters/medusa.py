"""Medusa: heads on the target guess several tokens ahead, each by itself; a tree holds the combinations that are likely."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

import torch
from annotated_types import Interval
from torch import nn
from torch.nn import functional

from runtime.config.settings import Count, built
from runtime.drafting.config.target import Target
from runtime.drafting.drafters.base import Ask, Drafter, Text, Verified
from runtime.drafting.drafters.heads import TargetParts, nbytes, rates_of, read_heads
from runtime.drafting.drafters.model import Candidates
from runtime.drafting.drafters.tables.odds import Odds
from runtime.drafting.shapes import Rates, Shape, fitted, widened
from runtime.errors import RequestError
from runtime.sampling.tree import ROOT, Tree


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
        for block in self.blocks:
            x = x + functional.silu(block(x))
        found: torch.Tensor = self.out(x)
        return found


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


_MOST_LOGITS = 1 << 24  # in memory at once; more texts are drafted for one part after another


@dataclass(eq=False)
class Medusa(Drafter):
    """From the hidden state that chose a text's last token, head k guesses the token k places after it. The likeliest guesses of each
    head are combined into a tree: every path is a candidate, as heads do not know of each other. Guesses are what the tree holds under
    sampling too; they are exact then as well.

    Source: Cai et al., Medusa: Simple LLM Inference Acceleration Framework with Multiple Decoding Heads, arXiv 2401.10774.

    Attributes:
        parts: of the target. heads: as they were trained.
        head: of the tokens that are proposed alone; None: the target's own.
        candidates: from its logits to tokens of the target.
        start: how often guesses are right by depth and rank, as measured after training.
        width: guesses of each head.
        shape: which of the combinations a tree holds: "fitted", those whose ranks were right most often, the paper's fixed tree (made anew
            now and then, as rates are learned); "likeliest", those that the heads now give most, corrected by how often each rank is right.
        refit: verified steps after which a fitted shape is made anew.
    """

    name: ClassVar[str] = "medusa"
    source: ClassVar[str] = "heads"
    wants = frozenset(["hidden"])

    parts: TargetParts = built()
    heads: MedusaHeads = built()
    head: nn.Module | None = built()
    candidates: Candidates = built()
    start: Sequence[Sequence[float]] = built()
    width: Annotated[int, Interval(ge=1, le=64)] = 8
    shape: Literal["likeliest", "fitted"] = "likeliest"
    refit: Count = 64

    @classmethod
    def build(cls, target: Target, directory: Path, facts: Mapping[str, Any], **settings: Any) -> Medusa:
        parts = TargetParts.of(target.engine)
        files = read_heads(directory, facts, cls.name, target.artifact, parts)
        count = files.size("count")
        with torch.device("meta"):
            heads = MedusaHeads(parts.hidden, count, files.size("blocks", 0))
        head, candidates = files.install(heads, parts)
        return cls(parts, heads, head, candidates, rates_of(facts, count), **settings)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.vocabulary = self.candidates.vocabulary
        self._rates = Rates(widened(self.start, self.width))
        self._odds = Odds(len(self.start) * self.width)
        self.reset()

    def reset(self) -> None:
        self._rates.reset()
        self._odds.reset()
        self._shapes: dict[tuple[int, int], Shape] = {}
        self._steps = 0

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
        """The likeliest tokens of every head, for all texts in one pass."""
        hidden = torch.stack([state.hidden for state in states]).to(self.parts.device, self.parts.dtype)
        ahead = self.heads(hidden, depth).flatten(0, 1)
        logits = self.parts.logits(ahead) if self.head is None else self.head(ahead).float()
        tokens, chances = self.candidates.best(logits, self.width)
        for place, state in enumerate(states):
            state.tokens = tokens[place :: len(states)]
            state.chances = chances[place :: len(states)]
            state.guessed = state.length

    def _tree(self, ask: Ask) -> Tree:
        state = ask.state
        chances = [
            [self._odds.chance(depth * self.width + rank, chance) for rank, chance in enumerate(ranks)]
            for depth, ranks in enumerate(state.chances)
        ]
        if self.shape == "likeliest":
            shape = fitted(chances, ask.nodes, ask.depth, ask.least)
        else:
            shape = self._fitted(ask.nodes, ask.depth)
        tree, reach, place = Tree(), {ROOT: 1.0}, {ROOT: ROOT}
        for node, (parent, rank, depth) in enumerate(zip(shape.parents, shape.ranks, shape.depths, strict=True)):
            above = place.get(parent)
            if above is None or reach[above] < ask.least or rank >= len(state.tokens[depth - 1]):
                continue
            chance = chances[depth - 1][rank]
            place[node] = tree.add(state.tokens[depth - 1][rank], above, chance)
            reach[place[node]] = reach[above] * chance
        return tree

    def _fitted(self, nodes: int, depth: int) -> Shape:
        if (nodes, depth) not in self._shapes:
            self._shapes[nodes, depth] = fitted(self._rates(), nodes, depth)
        return self._shapes[nodes, depth]

    # ---------------------------------------------------------------- what became of them
    def learn(self, state: _State, verified: Verified) -> None:
        if verified.hidden is None:
            raise RequestError("the engine gives no hidden states, which heads read")
        text = verified.text.tokens
        if state.guessed == len(text) - len(verified.new):
            self._settle(state, verified.new)
        state.hidden = verified.hidden[verified.row].clone()  # not a view, which would hold all of the step's
        state.length, state.guessed = len(text), -1

    def _settle(self, state: _State, new: Sequence[int]) -> None:
        """Each head is right or wrong where those before it were right, whether the tree held its guess or not."""
        for depth, (token, tokens, chances) in enumerate(zip(new, state.tokens, state.chances, strict=False)):
            rank = tokens.index(token) if token in tokens else None
            self._rates.observe(depth, rank)
            for place, chance in enumerate(chances):
                self._odds.count(depth * self.width + place, chance, place == rank)
            if rank is None:
                break
        self._steps += 1
        if self._steps % self.refit == 0:
            self._shapes.clear()

    @property
    def memory_bytes(self) -> int:
        return nbytes(self.heads) + (0 if self.head is None else nbytes(self.head))

    def describe(self) -> str:
        return f"{self.name} ({len(self.start)} heads)"


@dataclass(eq=False)
class _State:
    """One text.

    Attributes:
        hidden: `[hidden]`, that chose its last token.
        length: of the text then; -1: nothing was verified yet.
        tokens, chances: of each head, the likeliest first, as last guessed.
        guessed: length of the text for which they were; -1: that is settled.
    """

    hidden: torch.Tensor = field(default_factory=lambda: torch.empty(0))
    length: int = -1
    tokens: list[list[int]] = field(default_factory=list)
    chances: list[list[float]] = field(default_factory=list)
    guessed: int = -1
