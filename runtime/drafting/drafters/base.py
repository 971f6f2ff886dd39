"""Interface between decoding and a drafter. One file a drafter in this folder."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Protocol

import torch

from runtime.config.settings import Settings
from runtime.drafting.config.target import Target
from runtime.sampling.options import GenerationOptions
from runtime.sampling.tree import Tree


class Text(Protocol):
    """A sequence that is being decoded.

    Attributes:
        tokens: ids of the prompt and of all that follows so far; it only grows, at its end.
        prompt: how many of them the caller gave.
    """

    tokens: list[int]
    prompt: int


@dataclass(frozen=True)
class Draw:
    """How to draw what is proposed, where the target's tokens are drawn: as the target would, but from the drafter's logits.

    Attributes:
        options: temperature, top-k, top-p, ... of the call.
        generator: the sequence's random numbers.
    """

    options: GenerationOptions
    generator: torch.Generator


@dataclass(frozen=True)
class Place:
    """Where the target's own cache has a sequence, for drafters that are a part of the target (`Drafter.inside`).

    What they write there at positions from `start` on is overwritten when the draft is verified.

    Attributes:
        engine: the target's. pool: its pages' memory, as `Engine.step` takes it.
        pages: of the sequence, as of `Chunk`.
        start: tokens of the sequence that are in the cache: all but the last.
        room: tokens that the pages have room for from `start` on.
    """

    engine: Any
    pool: Any
    pages: Sequence[int]
    start: int
    room: int


@dataclass(frozen=True)
class Ask:
    """One sequence's turn.

    Attributes:
        state: what the drafter's `begin` gave for it.
        text: the sequence so far; its last token is what the first proposed one follows.
        nodes: most nodes of the tree, at least 1.
        depth: most tokens of a branch, at least 1.
        draw: None: guesses are wanted, the likeliest first. Drafters that have no distribution ignore it and guess.
        least: branches need not go on from nodes that are less likely to be reached than this, as far as the drafter can tell:
            they would cost more than they bring.
        place: of the sequence in the target's cache; only for drafters that are `inside`.
    """

    state: Any
    text: Text
    nodes: int
    depth: int
    draw: Draw | None = None
    least: float = 0.0
    place: Place | None = None


@dataclass(frozen=True)
class Verified:
    """What the target made of a tree.

    Attributes:
        text: with the new tokens already at its end.
        tree: what was verified; empty where nothing was proposed, and after a prompt.
        path: indices of the nodes that were accepted, from the root down.
        new: the tokens that were added: those of `path`, then one more that the target chose itself (fewer where the sequence ended).
        logits: the target's, float32 `[1 + len(tree), vocab]`: what follows the sequence as it was, then what follows each node; on the
            engine's device.
        hidden: the same rows of the last block's output, after the final norm, `[1 + len(tree), hidden]`; None unless the drafter
            `wants` "hidden".
    """

    text: Text
    tree: Tree
    path: Sequence[int]
    new: Sequence[int]
    logits: torch.Tensor
    hidden: torch.Tensor | None = None

    @property
    def row(self) -> int:
        """The row of `logits` and `hidden` that chose the last of `new`."""
        return 1 + self.path[-1] if self.path else 0


def drafted_where(
    asks: Sequence[Ask], fits: Callable[[Ask], bool], draft: Callable[[Sequence[Ask]], list[Tree]]
) -> list[Tree]:
    """A tree for each ask: what `draft` proposes for those that fit, together, and empty ones for the others."""
    trees = [Tree() for _ in asks]
    chosen = [index for index, ask in enumerate(asks) if fits(ask)]
    if chosen:
        for index, tree in zip(chosen, draft([asks[index] for index in chosen]), strict=True):
            trees[index] = tree
    return trees


class Drafter(Settings):
    """Proposes what may follow sequences. Wrong proposals cost only time: the target alone decides what is written.

    One file a drafter in this folder. A drafter whose settings configurations give is a dataclass (`runtime.config.settings`); what it
    draws on besides is in fields that are `built()`, and `build` fills them in.

    Attributes:
        name: as `drafter=` says it.
        source: what it drafts from: "text", "target" (a part of it), "model" (a draft model), "heads" (that a directory holds, for
            this target), "drafters" (others, which it composes).
        fact: key of draft.json by which a draft model says that this is the drafter it was trained for.
        wants: what of the target it reads: "hidden" (of every verified token), "prompt" (also of every token of prompts), "steps" (it
            learns from every step, also where it had proposed nothing).
        draws: True: with `Ask.draw` its trees hold `proposals`.
        inside: it computes with the target's own layers and cache, and is given a `Place`; only paged engines have one.
        overhead: seconds of the last `draft` that it would not take each time (reading what it had missed).
        vocabulary: ids it proposes are below it; None: it only repeats what it saw.
    """

    name: ClassVar[str]
    source: ClassVar[str] = "text"
    fact: ClassVar[str | None] = None
    wants: frozenset[str] = frozenset()
    draws: bool = False
    inside: bool = False
    overhead: float = 0.0
    vocabulary: int | None = None

    @classmethod
    def build(cls, target: Target, directory: Path, facts: Mapping[str, Any], **settings: Any) -> Drafter:
        """The drafter for a target.

        Args:
            directory: of the draft model or heads; meaningless for drafters that need none.
            facts: its draft.json; empty where there is none.
            settings: of the drafter, as they were read.

        Raises:
            ConfigError: a setting does not fit the target; UnfitError: its engine or the machine does not.
            RequestError, ArtifactError: the directory is another target's, or cannot be read.
        """
        return cls(**settings)

    def begin(self, text: Text) -> Any:
        """What the drafter remembers of one sequence; called when its prompt is known."""
        return None

    def draft(self, asks: Sequence[Ask]) -> list[Tree]:
        """A tree for each, of at most `nodes` nodes; an empty one where there is nothing to propose."""
        raise NotImplementedError

    def read(self, state: Any, start: int, tokens: Sequence[int], hidden: torch.Tensor) -> None:
        """The target has read `tokens` of the prompt at positions from `start` on; `hidden` is as in `Verified`. For "prompt"."""

    def learn(self, state: Any, verified: Verified) -> None:
        """What became of the last tree. With "steps" or "hidden" also what followed where there was none, the prompt's end among it."""

    def end(self, state: Any) -> None:
        """The sequence is finished or thrown away."""

    def forget(self) -> None:
        """Forget the sequences themselves, so that what was written before cannot be copied; rates that were learned from them stay."""

    def reset(self) -> None:
        """Forget all that was learned from sequences (not what was trained)."""

    @property
    def watched(self) -> bool:
        """It runs in a thread of its own, which is given up when it does not come back; those of this package always do."""
        return not type(self).__module__.startswith("runtime.drafting.drafters.")

    @property
    def memory_bytes(self) -> int:
        """Memory of its weights and tables, besides the target's."""
        return 0

    def describe(self) -> str:
        """In a few words, for `Model.stats`."""
        return self.name
