"""What speculative decoding needs of an engine with a cache of its own, one a call and not one of pages."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol, runtime_checkable

import torch

from runtime.engines.base import Engine, Piece


class Step(NamedTuple):
    """What a forward pass says.

    Attributes:
        logits: float32 `[rows, vocab]`.
        hidden: what the head reads (the last block's output after the final norm), float32 `[tokens, hidden]`; None where nobody asked.
    """

    logits: torch.Tensor
    hidden: torch.Tensor | None


class Drafts(Protocol):
    """The cache of texts that are written several tokens at a time: what is computed and turns out wrong is taken back.

    Attributes:
        trees: whether pieces may have `parents`; else they are chains.
        most_rows: tokens that a pass should have at most, over all texts.
        nbytes: memory of the cache.
    """

    trees: bool
    most_rows: int

    @property
    def nbytes(self) -> int: ...

    def read(self, ids: torch.Tensor, mask: torch.Tensor | None, positions: torch.Tensor) -> Step:
        """The prompts, padded on the left, int64 `[batch, longest]` each; `mask`: 1 = token, None: no padding.

        Returns:
            Logits after each prompt; hidden states of all prompts' tokens, one prompt after another, padding left out.
        """

    def room(self) -> int | None:
        """How many drafted tokens of a text the next pass may verify, so that each is computed as it would be alone; None: any."""

    def verify(self, pieces: Sequence[Piece]) -> Step:
        """Of each text its last token, which is not in the cache yet, with what may follow it.

        Args:
            pieces: one a text; `pages` mean nothing.

        Returns:
            Logits and hidden states of every token of the pieces, one piece after another.
        """

    def keep(self, paths: Sequence[Sequence[int]]) -> None:
        """Of each text's last piece only these tokens stay: ascending indices, 0 (the text's own last token) first, one branch."""

    def keep_rows(self, rows: Sequence[int]) -> None:
        """Drop all texts but these, in that order; before `keep` is called, or after."""


@runtime_checkable
class DraftingEngine(Engine, Protocol):
    """An engine that verifies drafts, for most models.

    Attributes:
        most_rows: tokens that a pass of drafts should have at most, over all texts.
    """

    @property
    def most_rows(self) -> int: ...

    def why_not_drafts(self) -> str | None:
        """The reason why it verifies none for this model, found by trying too; None: it does."""

    def new_drafts(self, batch: int, hidden: bool) -> Drafts:
        """An empty cache.

        Args:
            batch: how many texts.
            hidden: hidden states will be asked for.

        Raises:
            RequestError: it verifies no drafts for this model, as far as can be told without trying.
        """
