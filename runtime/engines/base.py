"""Interfaces of engines: causal models compute tokens to logits over a pool of pages, encoders and encoder-decoders whole batches."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch

if TYPE_CHECKING:
    from runtime.kv_cache.policy.policy import Policy
    from runtime.system.ranks import Ranks


class Retention(Protocol):
    """What of one sequence stays in the cache, and is read, of an engine that evicts tokens or selects what it reads.

    Attributes:
        evicted: tokens that left: the token at position p of the sequence is at slot p - evicted of its pages.
            Where layers and heads keep different numbers of tokens, slots say so too for the tokens that come after the eviction.
        boundary: so many tokens of the sequence must be in the cache, and no more, when some of them are evicted next; None: none is.
        moves: what stays is put in pages that hold nothing of the sequence yet.
        fixed: slots at the beginning that always stay as they are.
        prompt: tokens that it begins with, which are computed as those of any other sequence.
    """

    evicted: int
    boundary: int | None
    moves: bool
    fixed: int
    prompt: int

    @property
    def left(self) -> int:
        """Slots that are taken once tokens have been evicted at the boundary, at most."""

    @property
    def own(self) -> int:
        """Last tokens of the prompt that the sequence must compute itself, not find in pages of others."""

    def most(self, new: int) -> int:
        """Slots that the sequence takes at most at once where so many tokens come after its prompt."""


@dataclass(frozen=True)
class Chunk:
    """Part of one sequence in a step: consecutive tokens that are not in the cache yet.

    Attributes:
        tokens: their ids, at least one.
        start: position of the first of them; everything before is in the cache already.
        pages: the sequence's pages in order; slot s is in `pages[s // page_size]` at `s % page_size`. They cover the tokens.
        outputs: of how many of the last tokens the logits are wanted; only `Engine.verify` takes more than 1.
        parents: for tokens that form a tree, the index of the one before each (parents come first; -1: what is cached comes before).
            A token's position is then `start` and the number of those before it in its branch, and it sees its branch alone; its
            keys and values are where those of the token at `start` + its index would be. None: one after another.
        cached: of a tree, how many tokens were computed by chunks before this one (with the same `start`); `parents` says theirs too,
            `tokens` are those that come after them.
        retention: of the sequence; None: all stays and is read, and slots are positions.
    """

    tokens: Sequence[int]
    start: int
    pages: Sequence[int]
    outputs: int = 1
    parents: Sequence[int] | None = None
    cached: int = 0
    retention: Retention | None = None

    @property
    def slot(self) -> int:
        """Where in the pages the first of them goes."""
        return self.start - (0 if self.retention is None else self.retention.evicted)


def output_rows(chunks: Sequence[Chunk], every: bool = False) -> list[int]:
    """Of the tokens of all chunks those whose logits are wanted: the last `outputs` of each, or `every`."""
    ends = accumulate(len(chunk.tokens) for chunk in chunks)
    counts = [len(chunk.tokens) if every else chunk.outputs for chunk in chunks]
    return [row for count, end in zip(counts, ends, strict=True) for row in range(end - count, end)]


class Usage(NamedTuple):
    """What the KV cache of a call took: bytes at its largest, and tokens that steps read and could have read (0 without a selection)."""

    bytes: int
    read_tokens: int = 0
    held_tokens: int = 0


class Overhead(NamedTuple):
    """Memory that a pool takes beside its pages, in pages: of a step, and of each sequence that runs."""

    step: int = 0
    sequence: int = 0


@dataclass(frozen=True)
class EngineOptions:
    """What `runtime.load` was asked for, for engines of exports; defaults: nothing. `max_memory` is in bytes."""

    kernels: str = "auto"
    threads: int | None = None
    dtype: torch.dtype | None = None
    max_memory: int | None = None


class Sharing(Protocol):
    """Which pages sequences of a pool may share, where a page that is full is not all that a sequence reads of it."""

    def usable(self, pages: Sequence[int]) -> int:
        """After how many of these pages, which other sequences compute or have computed, another can begin."""

    def enter(self, pages: Sequence[int], shared: int) -> None:
        """A sequence of these pages will begin after the first `shared`."""

    def leave(self, pages: Sequence[int]) -> None:
        """The sequence of these pages is gone; another may begin on what it has computed."""

    def keep(self, memory: float) -> None:
        """Bytes that may be taken, beside pages, so that sequences can begin on what others have left."""


class Engine(ABC):
    """A loaded causal language model, whose KV cache is a pool of pages.

    Which page belongs to whom is the scheduler's business (`runtime.decoding`); a page that several sequences begin with is named
    by each of them. On engines with `lockstep` a page is a row of a batch (`runtime.engines.rows`). On the others the numbers of a
    sequence do not depend on what else is in the step, nor on how its tokens are cut into chunks.

    Attributes:
        device: where the logits are.
        vocab_size: ids are 0..vocab_size-1.
        logits_width: width of the logits.
        context_length: most positions the model was made for; None when it has no limit.
        weight_bytes: memory that the packed weights take.
        description: what computes, in a few words.
        page_size: positions a page holds.
        page_bytes: memory of one page, all layers together.
        overhead: memory that a pool takes beside its pages.
        policy: how keys and values are compressed; None: they are not.
        prefix: token ids that callers put before the tokens of every sequence; `context_length` does not count them.
        most_rows: tokens that one step takes at most, over all its chunks.
        draft_rows: tokens that a step of drafts should have at most.
        trees: whether chunks may have `parents`; else they are chains.
        lockstep: all sequences of a pool begin in its first step, with their whole prompts, and take part in every step until they end.
        padding_is_exact: False when a left-padded row of a lockstep engine is not computed as it would be alone.
        cache_budget: bytes that the pages of calls may take that say nothing; only engines under a bound have it.
        spare_pages: pages that the next pool gets without taking memory, because an earlier one has left them.
        ranks: that compute the model together, of which this engine is one; None: it computes alone.
    """

    device: torch.device
    vocab_size: int
    context_length: int | None
    weight_bytes: int
    description: str
    page_size: int
    page_bytes: int
    most_rows: int
    trees: bool = False
    lockstep: bool = False
    padding_is_exact: bool = True
    cache_budget: int | None = None
    overhead: Overhead = Overhead()
    policy: Policy | None = None
    prefix: tuple[int, ...] = ()
    ranks: Ranks | None = None

    @property
    def logits_width(self) -> int:
        """Width of the logits; `vocab_size` by default."""
        return self.vocab_size

    @property
    def draft_rows(self) -> int:
        """Tokens that a step of drafts should have at most."""
        return self.most_rows

    @property
    def spare_pages(self) -> int:
        """Pages that the next pool gets without taking memory; 0 by default."""
        return 0

    @abstractmethod
    def new_pages(self, count: int, drafts: bool = False) -> Any:
        """A pool of `count` pages, numbered from 0; its memory is taken as pages are first written.

        Args:
            drafts: tokens may be taken back, and `verify` will be called.
        """

    @abstractmethod
    def read(self, pool: Any, chunks: Sequence[Chunk], every: bool = False) -> torch.Tensor:
        """Write the chunks' keys and values; logits after the last token of each chunk, or after `every` token, float32 `[rows, vocab]`."""

    def step(self, pool: Any, chunks: Sequence[Chunk]) -> torch.Tensor:
        """As `read`, in the way that is fastest for decoding: logits after the last token of each chunk."""
        return self.read(pool, chunks)

    @abstractmethod
    def verify(
        self, pool: Any, chunks: Sequence[Chunk], hidden: bool = False
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """As `step`: logits, float32 `[sum of the chunks' outputs, vocab]`, of each chunk the last `outputs` tokens in their order.

        Tokens that turn out wrong are simply overwritten. Numbers of a branch are those that its tokens would get alone.

        Args:
            pool: from `new_pages`.
            chunks: of the step.
            hidden: also give what the head reads (the last block's output after the final norm), float32 `[tokens of all chunks,
                hidden]`; None otherwise.
        """

    @abstractmethod
    def keep(self, pool: Any, chunk: Chunk, path: Sequence[int]) -> None:
        """Of a verified chunk, move the keys and values of the tokens `path` (ascending indices, one branch from its root on) to
        the positions from `chunk.start` on. The others' are overwritten sooner or later.
        """

    def retention(self, prompt: int) -> Retention | None:
        """For a new sequence that begins with a prompt of so many tokens; None: it keeps and reads all."""
        return None

    def evict(self, pool: Any, retention: Retention, pages: Sequence[int], into: Sequence[int]) -> bool:
        """At the boundary of a sequence: of its `pages`, gather what stays in the first slots of `into`, and say so in `retention`.

        Pages of `into` are not read by others, but for those of `retention.fixed`; one that is in `pages` too is there at the same place.

        Returns:
            Whether the sequence is in `into` now; otherwise nothing was evicted.
        """
        raise NotImplementedError  # where `retention` gives none

    def slots(self, prompt: int, new: int) -> int:
        """Slots that a sequence takes at most at once; the last new token never enters the cache."""
        return prompt + new - 1

    def resume(self, pool: Any, tokens: Sequence[int], page: int) -> int:
        """Start a sequence in `page` of a pool whose only sequence, of an earlier call, has ended. Only for engines with `lockstep`.

        Returns:
            Length of the prefix of `tokens` that the pool already holds, less than all of them; the rest of the pool is dropped.
        """
        raise NotImplementedError  # pages know what they hold

    def sharing(self, pool: Any) -> Sharing | None:
        """Of a pool whose sequences cannot begin on every full page; None: they can."""
        return None

    def draft_room(self, pool: Any) -> int | None:
        """How many drafted tokens of a sequence the next step may verify, so that each is computed as it would be alone; None: any."""
        return None

    def why_not_drafts(self) -> str | None:
        """The reason why it verifies no drafts for this model, found by trying too; None: it does."""
        return None

    def logits(self, input_ids: torch.Tensor) -> torch.Tensor:
        """Logits of every position, int64 `[batch, seq]` to float32 `[batch, seq, vocab]`; no cache remains.

        Behind the prefix where static grids of inputs were calibrated behind it, else without.
        """
        return self._logits(input_ids, self.new_pages(-(-input_ids.shape[1] // self.page_size)))

    def _logits(self, input_ids: torch.Tensor, pool: Any) -> torch.Tensor:
        """As `logits`, row by row over the pages of a pool."""
        batch, width = input_ids.shape
        # Written in place: with a large vocabulary the logits are the most of what a call takes.
        logits = torch.empty(batch, width, self.logits_width, device=self.device)
        pages = range(-(-width // self.page_size))
        for ids, row in zip(input_ids.tolist(), logits, strict=True):
            for start in range(0, width, self.most_rows):
                chunk = Chunk(ids[start : start + self.most_rows], start, pages)
                row[start : start + self.most_rows] = self.read(pool, [chunk], every=True)
        return logits

    def usage(self, pool: Any, touched: int) -> Usage:
        """What a pool took, of which so many pages were written."""
        return Usage(touched * self.page_bytes)

    @abstractmethod
    def explain(self) -> dict[str, str]:
        """{module name: what computes it}."""


class BatchEngine(Protocol):
    """A loaded model that computes whole batches.

    Attributes:
        device: where inputs must be.
        vocab_size: ids are 0..vocab_size-1.
        context_length: most tokens of a row of `input_ids`; None when there is no limit.
        weight_bytes: memory that the packed weights take.
        description: what computes, in a few words.
    """

    device: torch.device
    vocab_size: int
    context_length: int | None
    weight_bytes: int
    description: str

    def explain(self) -> dict[str, str]:
        """{module name: what computes it}."""


class EncoderEngine(BatchEngine, Protocol):
    """A loaded encoder: token ids in, the hidden states after its last block out.

    Attributes:
        hidden_size: width of the hidden states.
    """

    hidden_size: int

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor | None) -> torch.Tensor:
        """Hidden states, float32 `[batch, seq, hidden]`; what is at padding means nothing.

        Segment ids, where a model has them, are all 0.

        Args:
            input_ids: int64 `[batch, seq]`.
            attention_mask: int64 `[batch, seq]`, 1 = token, 0 = padding; None: no padding anywhere.
        """


class Seq2SeqEngine(BatchEngine, Protocol):
    """A loaded encoder-decoder. A source is encoded once; decoding then grows a cache, all rows of a batch in step.

    Attributes:
        vocab_size: width of the logits too.
        features: sources are features of sounds, not token ids.
        decoder_context_length: most tokens of an output, the start token included; None when there is no limit.
    """

    features: bool
    decoder_context_length: int | None

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
