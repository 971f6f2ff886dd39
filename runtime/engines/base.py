"""What decoding needs of an engine. One file an engine in this folder; `runtime/api/load.py` picks the one that fits the directory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch


class Engine(Protocol):
    """A loaded causal language model.

    Attributes:
        device: where inputs must be.
        vocab_size: width of the logits; ids are 0..vocab_size-1.
        context_length: most positions the model was made for; None when it has no limit.
        padding_is_exact: False when a left-padded row is not computed as it would be alone; such batches are decoded in
            groups of equal length.
        weight_bytes: memory the weights take as they are held (packed).
        description: what computes, in a few words.
    """

    device: torch.device
    vocab_size: int
    context_length: int | None
    padding_is_exact: bool
    weight_bytes: int

    @property
    def description(self) -> str: ...

    def new_cache(self) -> Any:
        """An empty KV cache; it grows with every `forward`."""

    def forward(
        self,
        input_ids: torch.Tensor,
        cache: Any,
        attention_mask: torch.Tensor | None,
        position_ids: torch.Tensor | None,
        last_only: bool = False,
    ) -> torch.Tensor:
        """Logits, float32 `[batch, seq or 1, vocab]`.

        Args:
            input_ids: int64 `[batch, seq]`, the tokens after those in `cache`.
            cache: from `new_cache`, or None to keep nothing.
            attention_mask: int64 `[batch, cached + seq]`, 1 = token, 0 = padding; None: no padding anywhere.
            position_ids: int64 `[batch, seq]`; None: counted from the cached length.
            last_only: only the last position's logits are wanted.
        """

    def keep_rows(self, cache: Any, rows: torch.Tensor) -> None:
        """Drop all sequences of `cache` but `rows` (int64 indices), in that order, and free their memory."""

    def cache_bytes(self, cache: Any) -> int:
        """Memory that `cache` holds."""

    def explain(self) -> dict[str, str]:
        """{module name: what computes it}."""


class EncoderEngine(Protocol):
    """A loaded encoder: token ids in, the hidden states after its last block out.

    Attributes:
        device: where inputs must be.
        vocab_size: ids are 0..vocab_size-1.
        hidden_size: width of the hidden states.
        context_length: most tokens of a row; None when there is no limit.
        weight_bytes: memory the weights take as they are held (packed).
        description: what computes, in a few words.
    """

    device: torch.device
    vocab_size: int
    hidden_size: int
    context_length: int | None
    weight_bytes: int
    description: str

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor | None) -> torch.Tensor:
        """Hidden states, float32 `[batch, seq, hidden]`; what is at padding means nothing.

        Segment ids, where a model has them, are all 0.

        Args:
            input_ids: int64 `[batch, seq]`.
            attention_mask: int64 `[batch, seq]`, 1 = token, 0 = padding; None: no padding anywhere.
        """

    def explain(self) -> dict[str, str]:
        """{module name: what computes it}."""


class Seq2SeqEngine(Protocol):
    """A loaded encoder-decoder. A source is encoded once; decoding then grows a cache, all rows of a batch in step.

    Attributes:
        device: where inputs must be.
        vocab_size: width of the logits; ids are 0..vocab_size-1.
        features: sources are features of sounds, not token ids.
        context_length: most tokens of a source; None when there is no limit.
        decoder_context_length: most tokens of an output, the start token included; None when there is no limit.
        weight_bytes: memory the weights take as they are held (packed).
        description: what computes, in a few words.
    """

    device: torch.device
    vocab_size: int
    features: bool
    context_length: int | None
    decoder_context_length: int | None
    weight_bytes: int
    description: str

    def encode(self, input_ids: torch.Tensor, attention_mask: torch.Tensor | None) -> torch.Tensor:
        """States of the source, `[batch, seq, hidden]` in the engine's dtype.

        Args:
            input_ids: int64 `[batch, seq]`, or features of sounds, float32 `[batch, a, b]`, which have no mask.
            attention_mask: int64 `[batch, seq]`, 1 = token, 0 = padding (on the right); None: no padding anywhere.
        """

    def new_cache(self) -> Any:
        """An empty cache of keys and values, of the output and of the source; `decode` fills it."""

    def decode(
        self,
        decoder_input_ids: torch.Tensor,
        states: torch.Tensor,
        attention_mask: torch.Tensor | None,
        cache: Any,
        last_only: bool = False,
    ) -> torch.Tensor:
        """Logits, float32 `[batch, new or 1, vocab]`.

        Args:
            decoder_input_ids: int64 `[batch, new]`, the tokens after those in `cache`; the first of all is the start token.
            states: from `encode`, rows as in `decoder_input_ids`.
            attention_mask: the source's, as `encode` got it.
            cache: from `new_cache`, or None to keep nothing.
            last_only: only the last position's logits are wanted.
        """

    def keep_rows(self, cache: Any, rows: torch.Tensor) -> None:
        """Drop all sequences of `cache` but `rows` (int64 indices), in that order, and free their memory."""

    def cache_bytes(self, cache: Any) -> int:
        """Memory that `cache` holds."""

    def explain(self) -> dict[str, str]:
        """{module name: what computes it}."""


@dataclass(frozen=True)
class Chunk:
    """Part of one sequence in a step: consecutive tokens that are not in the cache yet.

    Attributes:
        tokens: their ids, at least one.
        start: position of the first of them; everything before is in the cache already.
        pages: the sequence's pages in order; position p is in `pages[p // page_size]` at `p % page_size`. They cover the tokens.
        outputs: of how many of the last tokens the logits are wanted; only `SpeculativeEngine.verify` takes more than 1.
        parents: for tokens that form a tree, the index of the one before each (parents come first; -1: what is cached comes before).
            A token's position is then `start` and the number of those before it in its branch, and it sees its branch alone; its
            keys and values are where those of the token at `start` + its index would be. None: one after another.
        cached: of a tree, how many tokens were computed by pieces before this one (with the same `start`); `parents` says theirs too,
            `tokens` are those that come after them.
    """

    tokens: Sequence[int]
    start: int
    pages: Sequence[int]
    outputs: int = 1
    parents: Sequence[int] | None = None
    cached: int = 0


@runtime_checkable
class PagedEngine(Engine, Protocol):
    """An engine whose KV cache is a pool of pages, so that sequences of any lengths share a step and a prefix is stored once.

    Which page belongs to whom is the scheduler's business (`runtime.decoding`); a page that several sequences begin with is named
    by each of them. Numbers of one sequence do not depend on what else is in the step, nor on how its tokens are cut into
    pieces.

    Attributes:
        page_size: positions a page holds.
        page_bytes: memory of one page, all layers together.
        most_rows: tokens that one step takes at most, over all its pieces.
        cache_budget: bytes that the pages of a call may take where it says nothing; only engines under a bound have it.
    """

    page_size: int
    page_bytes: int
    most_rows: int

    def new_pages(self, count: int) -> Any:
        """A pool of `count` pages, numbered from 0; its memory is taken as pages are first written."""

    def step(self, pool: Any, pieces: Sequence[Chunk]) -> torch.Tensor:
        """Write the pieces' keys and values; logits after the last token of each piece, float32 `[len(pieces), vocab]`."""


@runtime_checkable
class SpeculativeEngine(PagedEngine, Protocol):
    """A paged engine that computes tokens which may turn out wrong: those of a step that are not kept are simply overwritten.

    Attributes:
        trees: whether pieces may have `parents`; else they are chains.
    """

    trees: bool

    def verify(
        self, pool: Any, pieces: Sequence[Chunk], hidden: bool = False
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """As `step`: logits, float32 `[sum of the pieces' outputs, vocab]`, of each piece the last `outputs` tokens in their order.

        Numbers of a branch are those that its tokens would get alone.

        Args:
            pool: from `new_pages`.
            pieces: of the step.
            hidden: also give what the head reads (the last block's output after the final norm), float32 `[tokens of all pieces,
                hidden]`; None otherwise.
        """

    def keep(self, pool: Any, piece: Chunk, path: Sequence[int]) -> None:
        """Of a verified piece, move the keys and values of the tokens `path` (ascending indices, one branch from its root on) to
        the positions from `piece.start` on. The others' are overwritten sooner or later.
        """


# What speculative decoding needs of an engine with a cache of its own, one a call and not one of pages.


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

    def verify(self, pieces: Sequence[Chunk]) -> Step:
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
