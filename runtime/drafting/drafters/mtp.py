"""Recursive head on the target (FastMTP): one small block, applied to its own output again and again, drafts token after token."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Annotated, Any, ClassVar

import torch
from annotated_types import Interval
from torch import nn

from runtime.config.settings import Count, Probability, built
from runtime.drafting.drafters.base import Ask, Text, Verified
from runtime.drafting.drafters.draft_model import DRAFT
from runtime.drafting.drafters.heads import HeadDrafter, HeadFiles, TargetParts
from runtime.drafting.drafters.model import Chain
from runtime.drafting.drafters.mtp_block import BlockSizes, Entries, MTPBlock
from runtime.errors import ArtifactError
from runtime.sampling.tree import Tree

_CHUNK = 256  # entries computed at once
_WAITING = 32  # entries that may wait for the next draft; more are computed without one


@dataclass(eq=False)
class MTP(HeadDrafter):
    """The target's hidden states and the tokens after them are entries of a block with a cache of its own, whose output at the last one
    says the next token but one; with that token, its own output stands in for the state that is not known yet, and so on. What was
    drafted is taken out of the cache again, and put in anew from the target's states where it was accepted. Of a prompt whose beginning
    another sequence computed the cache begins later, at its place. Only the last entry needs more than its key and value: reading a prompt
    costs a small part of the block.

    Where it guesses, tokens that come next in likelihood are put beside each one of the chain, as branches that end there. Where it
    draws, it draws a chain.

    Source: Cai et al., FastMTP: Accelerating LLM Inference with Enhanced Multi-Token Prediction, arXiv 2509.18362.

    Attributes:
        width: guesses at each place.
        window: entries that the block sees, which bounds its cache.
        confidence: the chain ends at a token that gets less than this probability.
    """

    name: ClassVar[str] = "mtp"
    wants = frozenset(["hidden", "prompt"])
    draws = True

    module: MTPBlock = built()
    width: Annotated[int, Interval(ge=1, le=64)] = 4
    window: Count = 2048
    confidence: Probability = 0.0

    @classmethod
    def skeleton(cls, files: HeadFiles, parts: TargetParts) -> tuple[nn.Module, dict[str, Any]]:
        names = ("hidden", "intermediate", "heads", "kv_heads", "head_dim", "rotary")
        sizes = BlockSizes(**{name: files.size(name) for name in names})
        wrong = sizes.heads % sizes.kv_heads or sizes.rotary % 2 or sizes.rotary > sizes.head_dim
        if wrong or sizes.hidden != parts.hidden:
            raise ArtifactError(f"{files.path / DRAFT}: these sizes are those of no block: {asdict(sizes)}")
        return MTPBlock(sizes), {}

    def __post_init__(self) -> None:
        super().__post_init__()
        self.module.frequencies = self.module.frequencies.float()
        self._open: dict[int, _Slot] = {}

    # ---------------------------------------------------------------- sequences
    def begin(self, text: Text) -> _Slot:
        slot = _Slot(text, Entries(self.module.sizes, self.window, self.parts.dtype, self.parts.device))
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

    def note(self, state: _Slot, verified: Verified, hidden: torch.Tensor) -> None:
        rows = [0, *(node + 1 for node in verified.path)]
        state.note(len(verified.text.tokens) - len(verified.new) - 1, hidden[rows])
        if sum(len(states) for _, states in state.notes) > _WAITING:
            self._catch_up([state])

    @torch.inference_mode()
    def _catch_up(self, slots: Sequence[_Slot]) -> None:
        """Keys and values of all entries that wait."""
        notes = [(slot, start, len(states)) for slot in slots for start, states in slot.notes]
        if not notes:
            return
        hidden = torch.cat([states for slot in slots for _, states in slot.notes])
        hidden = hidden.to(self.parts.device, self.parts.dtype)
        ids = torch.tensor([each for slot, start, n in notes for each in slot.text.tokens[start + 1 : start + 1 + n]])
        positions = torch.cat([torch.arange(start, start + count) for _, start, count in notes])
        x = self.module.mixed(hidden, self.parts.embed(ids))
        keys, values = self.module.keys_values(x, self.module.turns(positions.to(self.parts.device)))
        row = 0
        for slot, start, count in notes:
            rows = slice(row, row + count)
            row = rows.stop
            slot.entries.reserve(count)
            slot.entries.add(keys[rows], values[rows])
            slot.tip, slot.place = x[row - 1].clone(), start + count - 1
        for slot in slots:
            slot.notes = []

    # ---------------------------------------------------------------- drafts
    @torch.inference_mode()
    def draft(self, asks: Sequence[Ask]) -> list[Tree]:
        grown = [_Grown(ask) for ask in asks]
        block = self.module
        alive = [each for each in grown if each.ask.state.end == len(each.ask.text.tokens) - 1]
        self._catch_up([each.ask.state for each in alive])
        if not alive:
            return [each.tree for each in grown]
        for each in alive:
            each.ask.state.entries.reserve(each.ask.depth)
        x = torch.stack([each.ask.state.tip for each in alive])
        positions = torch.tensor([each.ask.state.place for each in alive], device=self.parts.device)
        turns = block.turns(positions)
        while True:
            queries = block.queries(x, turns)
            found = [each.ask.state.entries.attend(row) for each, row in zip(alive, queries, strict=True)]
            states = block.finish(x, torch.stack(found))
            rows = self._choose(alive, self.parts.logits(states))
            if not rows:
                break
            alive = [alive[row] for row in rows]
            ids = torch.tensor([each.tree.tokens[each.last] for each in alive])
            x = block.mixed(states[rows], self.parts.embed(ids))
            positions = positions[rows] + 1
            turns = block.turns(positions)
            for each, key, value in zip(alive, *block.keys_values(x, turns), strict=True):
                each.ask.state.entries.add(key[None], value[None])
                each.added += 1
        for each in grown:
            each.ask.state.entries.drop(each.added)
        # A drawn chain stays as it is.
        return [each.tree if each.tree.proposals else each.tree.best(each.ask.nodes) for each in grown]

    def _choose(self, alive: Sequence[_Grown], logits: torch.Tensor) -> list[int]:
        """The next token of each chain, and what is put beside it; which of the chains go on."""
        if alive[0].ask.draw is None:  # as of all of a call
            guesses = zip(alive, *self.candidates.best(logits, self.width), strict=True)
            going = [each.guess(tokens, chances, self.confidence) for each, tokens, chances in guesses]
        else:
            pairs = zip(alive, logits, strict=True)
            going = [each.add(*self.candidates.next(row, each), self.confidence) for each, row in pairs]
        return [row for row, goes_on in enumerate(going) if goes_on]

    @property
    def memory_bytes(self) -> int:
        return super().memory_bytes + sum(slot.entries.nbytes for slot in self._open.values())


@dataclass(eq=False)
class _Slot:
    """One sequence.

    Attributes:
        entries: computed. notes: of those that are not yet, a position and states `[n, hidden]` of the tokens from it on.
        end: position of the next one.
        tip: what the block reads of the last entry that was computed, `[hidden]`; place: its position.
    """

    text: Text
    entries: Entries
    notes: list[tuple[int, torch.Tensor]] = field(default_factory=list)
    end: int = 0
    tip: torch.Tensor = field(default_factory=lambda: torch.empty(0))
    place: int = -1

    def note(self, start: int, hidden: torch.Tensor) -> None:
        """The target's states at `start` on: those that are new, and whose next token is known. A gap before them stays one."""
        first, last = max(start, self.end), min(start + hidden.shape[0], len(self.text.tokens) - 1)
        if first < last:
            self.notes.append((first, hidden[first - start : last - start]))
            self.end = last


@dataclass(eq=False)
class _Grown(Chain):
    """The tree of one turn: a chain, and guesses beside its tokens.

    Attributes:
        added: entries that are in the cache for it.
    """

    added: int = 0

    def guess(self, tokens: Sequence[int], chances: Sequence[float], confidence: float) -> bool:
        """What may follow the chain, the likeliest first, which it goes on with where that could be worth more than what the tree has."""
        parent = self.last
        goes_on = self.add(tokens[0], chances[0], confidence)
        for token, chance in zip(tokens[1:], chances[1:], strict=True):
            self.tree.add(token, parent, chance)
        best = heapq.nlargest(self.ask.nodes, self.tree.reach())
        return goes_on and (len(best) < self.ask.nodes or self.reach > best[-1])
