"""Recursive head on the target (FastMTP): one small block, applied to its own output again and again, drafts token after token."""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, ClassVar

import torch
from annotated_types import Interval
from torch import nn

from runtime.config.settings import Count, Probability, built
from runtime.drafting.config.target import Target
from runtime.drafting.drafters.base import Ask, Drafter, Text, Verified
from runtime.drafting.drafters.draft_model import DRAFT
from runtime.drafting.drafters.heads import TargetParts, nbytes, read_heads
from runtime.drafting.drafters.model import Candidates
from runtime.drafting.drafters.mtp_block import BlockSizes, Entries, MTPBlock
from runtime.errors import ArtifactError, RequestError
from runtime.sampling.tree import ROOT, Tree

_CHUNK = 256  # entries computed at once
_WAITING = 32  # entries that may wait for the next draft; more are computed without one


@dataclass(eq=False)
class MTP(Drafter):
    """The target's hidden states and the tokens after them are entries of a block with a cache of its own, whose output at the last one
    says the next token but one; with that token, its own output stands in for the state that is not known yet, and so on. What was
    drafted is taken out of the cache again, and put in anew from the target's states where it was accepted. Of a prompt whose beginning
    another sequence computed the cache begins later, at its place. Only the last entry needs more than its key and value: reading a prompt
    costs a small part of the block.

    Where it guesses, tokens that come next in likelihood are put beside each one of the chain, as branches that end there. Where it
    draws, it draws a chain.

    Source: Cai et al., FastMTP: Accelerating LLM Inference with Enhanced Multi-Token Prediction, arXiv 2509.18362.

    Attributes:
        parts: of the target. block: as it was trained.
        head: of the tokens that are proposed alone (the paper's compressed vocabulary); None: the target's own.
        candidates: from its logits to tokens of the target.
        width: guesses at each place.
        window: entries that the block sees, which bounds its cache.
        confidence: the chain ends at a token that gets less than this probability.
    """

    name: ClassVar[str] = "mtp"
    source: ClassVar[str] = "heads"
    wants = frozenset(["hidden", "prompt"])
    draws = True

    parts: TargetParts = built()
    block: MTPBlock = built()
    head: nn.Module | None = built()
    candidates: Candidates = built()
    width: Annotated[int, Interval(ge=1, le=64)] = 4
    window: Count = 2048
    confidence: Probability = 0.0

    @classmethod
    def build(cls, target: Target, directory: Path, facts: Mapping[str, Any], **settings: Any) -> MTP:
        parts = TargetParts.of(target.engine)
        files = read_heads(directory, facts, cls.name, target.artifact, parts)
        names = ("hidden", "intermediate", "heads", "kv_heads", "head_dim", "rotary")
        sizes = BlockSizes(**{name: files.size(name) for name in names})
        wrong = sizes.heads % sizes.kv_heads or sizes.rotary % 2 or sizes.rotary > sizes.head_dim
        if wrong or sizes.hidden != parts.hidden:
            raise ArtifactError(f"{directory / DRAFT}: these sizes are those of no block: {sizes.as_dict()}")
        with torch.device("meta"):
            block = MTPBlock(sizes)
        head, candidates = files.install(block, parts)
        block.frequencies = block.frequencies.float()
        return cls(parts, block, head, candidates, **settings)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.vocabulary = self.candidates.vocabulary
        self._open: dict[int, _Slot] = {}

    # ---------------------------------------------------------------- sequences
    def begin(self, text: Text) -> _Slot:
        slot = _Slot(text, Entries(self.block.sizes, self.window, self.parts.dtype, self.parts.device))
        self._open[id(slot)] = slot
        return slot

    def end(self, state: _Slot) -> None:
        self._open.pop(id(state), None)

    def read(self, state: _Slot, start: int, tokens: Sequence[int], hidden: torch.Tensor) -> None:
        for first in range(0, len(tokens), _CHUNK):
            # The cache sees no further back than its window.
            if start + first + _CHUNK > state.text.prompt - self.window:
                state.note(start + first, hidden[first : first + _CHUNK])
                self._catch_up([state])

    def learn(self, state: _Slot, verified: Verified) -> None:
        if verified.hidden is None:
            raise RequestError("the engine gives no hidden states, which heads read")
        rows = [0, *(node + 1 for node in verified.path)]
        # Copies: a view would hold all of the step's.
        chain = rows[-1] == len(rows) - 1
        hidden = verified.hidden[: len(rows)].clone() if chain else verified.hidden[rows]
        state.note(len(verified.text.tokens) - len(verified.new) - 1, hidden)
        if state.waiting > _WAITING:
            self._catch_up([state])

    @torch.inference_mode()
    def _catch_up(self, slots: Sequence[_Slot]) -> None:
        """Keys and values of all entries that wait."""
        notes = [(slot, note) for slot in slots for note in slot.notes]
        if not notes:
            return
        hidden = torch.cat([note.hidden for _, note in notes]).to(self.parts.device, self.parts.dtype)
        ids = torch.tensor([token for _, note in notes for token in note.following])
        positions = torch.cat([torch.arange(note.start, note.start + len(note.following)) for _, note in notes])
        x = self.block.mixed(hidden, self.parts.embed(ids))
        keys, values = self.block.keys_values(x, self.block.turns(positions.to(self.parts.device)))
        row = 0
        for slot, note in notes:
            rows = slice(row, row + len(note.following))
            row = rows.stop
            slot.entries.reserve(len(note.following))
            slot.entries.add(keys[rows], values[rows])
            slot.tip, slot.place = x[row - 1].clone(), note.start + len(note.following) - 1
        for slot in slots:
            slot.notes, slot.waiting = [], 0

    # ---------------------------------------------------------------- drafts
    @torch.inference_mode()
    def draft(self, asks: Sequence[Ask]) -> list[Tree]:
        grown = [_Grown(ask) for ask in asks]
        alive = [each for each in grown if each.ask.state.end == len(each.ask.text.tokens) - 1]
        self._catch_up([each.ask.state for each in alive])
        if not alive:
            return [each.tree for each in grown]
        for each in alive:
            each.ask.state.entries.reserve(each.ask.depth)
        x = torch.stack([each.ask.state.tip for each in alive])
        positions = torch.tensor([each.ask.state.place for each in alive], device=self.parts.device)
        turns = self.block.turns(positions)
        while True:
            queries = self.block.queries(x, turns)
            found = [each.ask.state.entries.attend(row) for each, row in zip(alive, queries, strict=True)]
            states = self.block.finish(x, torch.stack(found))
            self._choose(alive, self.parts.logits(states) if self.head is None else self.head(states).float())
            rows = [row for row, each in enumerate(alive) if each.goes_on(self.confidence)]
            if not rows:
                break
            alive = [alive[row] for row in rows]
            ids = torch.tensor([each.tree.tokens[each.last] for each in alive])
            x = self.block.mixed(states[rows], self.parts.embed(ids))
            positions = positions[rows] + 1
            turns = self.block.turns(positions)
            for each, key, value in zip(alive, *self.block.keys_values(x, turns), strict=True):
                each.ask.state.entries.add(key[None], value[None])
                each.added += 1
        for each in grown:
            each.ask.state.entries.drop(each.added)
        return [each.best() for each in grown]

    def _choose(self, alive: Sequence[_Grown], logits: torch.Tensor) -> None:
        """The next token of each chain, and what is put beside it."""
        guessing = [row for row, each in enumerate(alive) if each.ask.draw is None]
        if guessing:
            tokens, chances = self.candidates.best(logits[guessing], self.width)
            for row, ids, sure in zip(guessing, tokens, chances, strict=True):
                alive[row].add(ids, sure)
        for each, row in zip(alive, logits, strict=True):
            draw = each.ask.draw
            if draw is not None:
                q = self.candidates.distribution(row, draw, [*each.ask.text.tokens, *each.tree.tokens])
                (token,) = self.candidates.draw(q, draw)
                each.tree.proposals[each.last] = q
                each.add([token], [float(q[token])])

    @property
    def memory_bytes(self) -> int:
        weights = nbytes(self.block) + (0 if self.head is None else nbytes(self.head))
        return weights + sum(slot.entries.nbytes for slot in self._open.values())


@dataclass
class _Note:
    """Entries that are not computed yet: states `[n, hidden]` of the tokens at `start` on, and the tokens that follow these."""

    start: int
    hidden: torch.Tensor
    following: list[int]


@dataclass(eq=False)
class _Slot:
    """One sequence.

    Attributes:
        entries: computed. notes: that wait, `waiting` entries.
        end: position of the next one.
        tip: what the block reads of the last entry that was computed, `[hidden]`; place: its position.
    """

    text: Text
    entries: Entries
    notes: list[_Note] = field(default_factory=list)
    waiting: int = 0
    end: int = 0
    tip: torch.Tensor = field(default_factory=lambda: torch.empty(0))
    place: int = -1

    def note(self, start: int, hidden: torch.Tensor) -> None:
        """The target's states at `start` on: those that are new, and whose next token is known. A gap before them stays one."""
        first, last = max(start, self.end), min(start + hidden.shape[0], len(self.text.tokens) - 1)
        if first < last:
            self.notes.append(
                _Note(first, hidden[first - start : last - start], self.text.tokens[first + 1 : last + 1])
            )
            self.waiting += last - first
            self.end = last


@dataclass(eq=False)
class _Grown:
    """The tree of one turn.

    Attributes:
        last: node at which the chain goes on.
        added: entries that are in the cache for it.
        reach: of each node.
    """

    ask: Ask
    tree: Tree = field(default_factory=Tree)
    last: int = ROOT
    length: int = 0
    added: int = 0
    reach: list[float] = field(default_factory=list)

    def add(self, tokens: Sequence[int], chances: Sequence[float]) -> None:
        """What may follow the chain, the likeliest first, which it goes on with."""
        parent, before = self.last, 1.0 if self.last == ROOT else self.reach[self.last]
        for place, (token, chance) in enumerate(zip(tokens, chances, strict=True)):
            node = self.tree.add(token, parent, chance)
            self.reach.append(before * chance)
            if place == 0:
                self.last = node
        self.length += 1

    def goes_on(self, confidence: float) -> bool:
        """Whether what follows the chain could be worth more than what the tree has."""
        ask, reach = self.ask, self.reach[self.last]
        if self.length >= min(ask.nodes, ask.depth) or self.tree.chances[self.last] < confidence or reach < ask.least:
            return False
        return len(self.reach) < ask.nodes or reach > heapq.nlargest(ask.nodes, self.reach)[-1]

    def best(self) -> Tree:
        """The likeliest nodes in falling order; a drawn chain as it is."""
        tree = self.tree
        if tree.proposals or not len(tree):
            return tree
        order = sorted(range(len(tree)), key=lambda node: (-self.reach[node], node))[: self.ask.nodes]
        return tree.keep(order)
