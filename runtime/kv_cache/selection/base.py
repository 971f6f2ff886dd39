"""Interface of a selection: the cache stays whole, and a decoding step reads a part of it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, TypeVar

import torch

from runtime.config.settings import ConfigError, Count, Settings, Share
from runtime.kv_cache.layer_state import LayerState
from runtime.kv_cache.pages import PAGE
from runtime.kv_cache.region import Chosen, Queries, Region
from runtime.kv_cache.selection.layout import Layout, PositionWatch, best, between
from runtime.kv_cache.shape import Shape


@dataclass(frozen=True)
class Budget(Settings, ABC):
    """How much a head reads in a step, what it always reads included. The options of every selection begin with it.

    Attributes:
        tokens: so many; None where `ratio` says it.
        ratio: of the tokens that the head holds, in (0, 1]; None where `tokens` says it.
        name: in recipes.
        needs_aligned: it reads the same positions in all heads or layers, which must have the same tokens there.
    """

    name: ClassVar[str]
    needs_aligned: ClassVar[bool] = False
    tokens: Count | None = None
    ratio: Share | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if (self.tokens is None) == (self.ratio is None):
            raise ConfigError(("tokens",), "either ratio or tokens says how much is read; give one of them")

    @abstractmethod
    def begin(self, layers: int) -> Selection[Any]:
        """The selection of one new cache with so many compressed layers."""

    def check_shape(self, shape: Shape) -> None:
        """ValueError, "NAME.FIELD ..." in one sentence, where the settings do not fit a model of this shape."""

    def always(self) -> int:
        """Tokens that it reads whatever the budget, at most; a budget must be larger."""
        return int(getattr(self, "sinks", 0) + getattr(self, "recent", 0))

    def counts(self, lengths: torch.Tensor) -> torch.Tensor:
        """Tokens that heads with `lengths` of them read, int64; never more than there are."""
        if self.ratio is None:
            return lengths.clamp(max=self.tokens)
        return (lengths.double() * self.ratio).round().long()

    def most(self, longest: int) -> int:
        """As `counts` for one head, on the host."""
        if self.ratio is None:
            assert self.tokens is not None
            return min(self.tokens, longest)
        return round(longest * self.ratio)

    def pick(self, votes: torch.Tensor, lengths: torch.Tensor, longest: int, sinks: int, recent: int) -> Chosen:
        """The tokens with most votes that the budget has room for beside the first `sinks` and the newest `recent`.

        Args:
            votes: `[rows, n]`.
            lengths: int64 `[rows]`, tokens to choose from.
            longest: on the host, at least the longest of them.
            sinks: first tokens, which are read anyway.
            recent: newest tokens, likewise.
        """
        votes = votes.masked_fill(~between(lengths, votes.shape[1], sinks, recent), float("-inf"))
        counts = (self.counts(lengths) - sinks - recent).clamp(min=0)
        return best(votes, counts, max(0, self.most(longest) - sinks - recent))


#: The dataclass of a selection's options, whose fields are the recipe's.
Options = TypeVar("Options", bound=Budget)


class Selection(ABC, Generic[Options]):
    """Tokens that the steps of one cache read, by one method. A file each in this folder, with the dataclass of its options.

    Args:
        options: the recipe's.
        layers: how many.

    Attributes:
        reads: tokens that steps have read.
    """

    def __init__(self, options: Options, layers: int) -> None:
        self.options, self.reads = options, ReadCounter(layers)
        self._watches = [PositionWatch() for _ in range(layers)]
        self._known: list[Any] = [None] * layers  # by layer, with an `nbytes` and a `before` (see `_recall`)
        self._aligned: list[int | None] = [None] * layers  # a layer's `changes` when its heads were last compared

    def choose(self, layer: LayerState, queries: Queries, regions: list[Region]) -> list[Chosen | None]:
        """What this step reads of each region; None: all of it.

        Called once a layer and step, in the order of layers, after the step's tokens were appended to the tail.

        Args:
            layer: `index`, `shape` (batch, kv_heads), `changes`: when that has grown, positions known from before are void, and
                `taken_back`: when that has grown, they are from so many positions before the end on.
            queries: the step's.
            regions: in order of arrival, the tail last.

        Raises:
            ValueError: what the layer holds does not go with the method.
        """
        longest = sum(region.longest for region in regions)
        chosen = None
        if layer.index >= getattr(self.options, "skip_layers", 0) and self.options.most(longest) < longest:
            chosen = self._choose(layer, queries, Layout(regions))
        chosen = [None] * len(regions) if chosen is None else chosen
        self.reads.add(layer.index, regions, chosen)
        return chosen

    @abstractmethod
    def _choose(self, layer: LayerState, queries: Queries, layout: Layout) -> list[Chosen | None] | None:
        """As `choose`, for layers that the method does not skip, where the budget leaves out any token; None: everything is read."""

    def nbytes(self, index: int) -> int:
        """Memory of what the method has beside layer `index`'s cache, as allocated."""
        known = self._known[index]
        return 0 if known is None else int(known.nbytes)

    def _recall(self, layer: LayerState, layout: Layout) -> Any:
        """What is known of a layer's tokens, `before` those that were taken back; None: nothing, or other tokens are in their places."""
        watch, known = self._watches[layer.index], self._known[layer.index]
        if watch.void(layer, layout):
            known = None
        elif known is not None and watch.stays is not None:
            known = known.before(watch.stays)
        self._known[layer.index] = known
        return known

    def _sequences(self, layer: LayerState, layout: Layout) -> torch.Tensor:
        """The lengths `[batch]` of sequences all of whose heads hold the same tokens; heads that are alike stay so until tokens leave.

        Raises:
            ValueError: heads hold different numbers of tokens, or in different orders.
        """
        heads = layout.lengths.view(layer.shape)
        if self._aligned[layer.index] != layer.changes:
            alike = f"{self.options.name} reads the same tokens in all heads"
            if layer.storage.is_final:
                text = "which several storages, or clusters, put into different orders: store older tokens in one way"
                raise ValueError(f"{alike}, {text}")
            if not bool((heads == heads[:, :1]).all()):
                text = f"but those of layer {layer.index} hold different numbers of them"
                raise ValueError(f"{alike}, {text}: evict nothing, or the same tokens in all heads")
            self._aligned[layer.index] = layer.changes
        return heads[:, 0]


class ReadCounter:
    """Numbers of tokens that attention steps read, and of those that were there, layer by layer; they stay on the device.

    Args:
        layers: how many.
    """

    def __init__(self, layers: int) -> None:
        self._counts: list[tuple[torch.Tensor | int, torch.Tensor | int]] = [(0, 0)] * layers

    def add(self, layer: int, regions: list[Region], chosen: list[Chosen | None]) -> None:
        """One step of one layer."""
        for region, some in zip(regions, chosen, strict=True):
            (read, stored), own = self._counts[layer], region.lengths.sum()
            self._counts[layer] = read + (own if some is None else tokens_of(region, some).sum()), stored + own

    @property
    def totals(self) -> tuple[int, int]:
        """Tokens read and tokens there, of all layers and steps."""
        return sum(int(read) for read, _ in self._counts), sum(int(stored) for _, stored in self._counts)

    def share(self, layer: int | None = None) -> float:
        """Share of the tokens that were read, of one layer or all (every layer's token counts the same); 1 before the first step."""
        read, stored = self.totals if layer is None else map(int, self._counts[layer])
        return read / stored if stored else 1.0


def tokens_of(region: Region, chosen: Chosen) -> torch.Tensor:
    """Tokens of each row that were chosen, int64 `[rows]`."""
    if chosen.unit == 1:
        return chosen.counts
    tokens = (region.lengths[:, None] - PAGE * chosen.index).clamp(0, PAGE)
    return (tokens * chosen.counted).sum(1)
