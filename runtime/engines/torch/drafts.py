"""Verification of drafts by transformers' modules: one pass over a batch of token trees, whose branches a mask keeps apart.

What is accepted of each row differs, so that the cache gets holes, which nothing sees; when they are too many all rows close up.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from runtime.engines.base import Chunk, Step

if TYPE_CHECKING:
    from runtime.engines.torch.engine import TorchEngine


# Which columns of a cache hold what: layers that see equally far have the same ones.

HOLE = -1  # the place of what a column holds and nobody may see
_KINDS = {"full_attention", "sliding_attention"}


@dataclass(eq=False)
class Columns:
    """Layers whose caches have the same columns, since they see equally far.

    Attributes:
        kind: of attention, as configs say it.
        layers: their indices.
        window: tokens that each token sees, its own included; 0: all before it.
        places: int64 `[batch, columns]`: the position in its text of what a column holds, or `HOLE`.
    """

    kind: str
    layers: list[int]
    window: int
    places: torch.Tensor

    def visible(self, positions: torch.Tensor) -> torch.Tensor:
        """Which columns tokens at `positions` `[batch, q]` see: bool `[batch, q, columns]`."""
        places = self.places[:, None]
        seen = (places >= 0).expand(-1, positions.shape[1], -1)
        return seen & (places > positions[:, :, None] - self.window) if self.window else seen

    def needed(self, lengths: Sequence[int]) -> int:
        """Columns that would do, for texts of these lengths."""
        return max(min(length, self.window or length) for length in lengths)


def columns(config: Any) -> list[Columns] | str:
    """The kinds of layers of a text config, with no column yet; or what is against them."""
    from transformers.cache_utils import DynamicCache, DynamicLayer, DynamicSlidingWindowLayer

    named = set(getattr(config, "layer_types", None) or ())
    if getattr(config, "attention_chunk_size", None) and not named:
        named = {"chunked_attention"}
    if named - _KINDS:
        kinds = ", ".join(sorted(named - _KINDS))
        return f"has layers of {kinds}, whose caches cannot hold the branches of a draft"
    empty = torch.zeros(0, 0, dtype=torch.int64)
    found: dict[int, Columns] = {}
    for index, layer in enumerate(DynamicCache(config=config).layers):
        if type(layer) not in (DynamicLayer, DynamicSlidingWindowLayer):
            return f"caches with {type(layer).__name__}, which cannot hold the branches of a draft"
        window = int(getattr(layer, "sliding_window", 0))
        kind = "sliding_attention" if window else "full_attention"
        found.setdefault(window, Columns(kind, [], window, empty)).layers.append(index)
    if len(found) - (0 in found) > 1:
        return "has layers with sliding windows of several sizes"
    return list(found.values())


def gathered(states: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """The columns `index` `[batch, n]` of keys or values `[batch, heads, columns, size]`."""
    return states.gather(2, index[:, None, :, None].expand(-1, states.shape[1], -1, states.shape[3]))


MOST_ROWS = 512
# Holes that a row of the cache may always have, and as a share of its columns.
FREE_HOLES = 16
HOLES_SHARE = 0.25
_MASKS = ("sdpa", "eager")  # attention functions that take any mask


def why_not(engine: TorchEngine) -> str | None:
    """Why drafts cannot be verified for a model over a plain cache, as its class and its config say; None: nothing is against it."""
    module, config = engine.module, engine.module.config.get_text_config(decoder=True)
    name = type(module).__name__
    found = columns(config)
    if isinstance(found, str):
        return f"{name} {found}"
    if not engine.padding_is_exact:
        return f"{name} takes no positions, and counts tokens by the columns of its cache, which drafts leave holes in"
    if getattr(config, "alibi", False) or "local" in (getattr(config, "attention_layers", None) or ()):
        return f"{name} counts distances by the columns of its cache, which drafts leave holes in"
    if getattr(config, "num_kv_shared_layers", None) or "reuse" in (getattr(config, "kv_sharing_modes", None) or ()):
        return f"{name} has layers that share the cache of others"
    implementation = getattr(config, "_attn_implementation", None)
    if implementation not in _MASKS:
        return f"{name} computes attention with {implementation!r}, which does not take the mask of a token tree"
    return None


class TorchDrafts:
    """See `runtime.engines.base.Drafts`. Made by `TorchEngine.new_drafts`."""

    trees = True
    most_rows = MOST_ROWS

    def __init__(self, engine: TorchEngine, batch: int, hidden: bool) -> None:
        from transformers import DynamicCache

        config = engine.module.config.get_text_config(decoder=True)
        found = columns(config)
        assert not isinstance(found, str), "asked of why_not before"
        self._engine, self._hidden = engine, hidden
        self._eager = config._attn_implementation == "eager"
        # Not of the model's config: windows are cut here, where it is known which token is in which column.
        self._cache: Any = DynamicCache()
        self._columns = found
        self._lengths = [0] * batch
        # Of the last pass: positions `[batch, width]`, on the engine's device.
        self._last = torch.zeros(batch, 0, dtype=torch.int64)

    @property
    def nbytes(self) -> int:
        return self._engine.cache_bytes(self._cache)

    def room(self) -> int | None:
        return None

    # ---------------------------------------------------------------- passes
    @torch.inference_mode()
    def read(self, ids: torch.Tensor, mask: torch.Tensor | None, positions: torch.Tensor) -> Step:
        with states_of(self._engine.module, self._hidden) as states:
            logits = self._engine.forward(ids, self._cache, mask, positions, True)[:, -1]
        places = positions if mask is None else positions.masked_fill(mask == 0, HOLE)
        for kind in self._columns:
            kind.places = places
        self._lengths = (positions[:, -1] + 1).tolist()
        self._last = places[:, :0]
        self._trim()
        hidden = None
        if states:
            hidden = states[0].flatten(0, 1) if mask is None else states[0][mask > 0]
        return Step(logits, None if hidden is None else hidden.float())

    @torch.inference_mode()
    def verify(self, pieces: Sequence[Chunk]) -> Step:
        device = self._engine.device
        self._lengths = [piece.start for piece in pieces]
        seen = real = None
        if all(len(piece.tokens) == 1 for piece in pieces):
            ids, positions = torch.tensor([[[p.tokens[0]] for p in pieces], [[p.start] for p in pieces]], device=device)
        else:
            numbers, tree, real = _packed(pieces)
            ids, positions = torch.from_numpy(numbers).to(device)
            seen = torch.from_numpy(tree).to(device)
        mask = self._mask(positions, seen)
        with states_of(self._engine.module, self._hidden) as states:
            logits = self._engine.forward(ids, self._cache, mask, positions)
        self._last = positions
        flat = [each.flatten(0, 1) for each in (logits, *states)]
        if real is not None:
            wanted = torch.from_numpy(real).to(device)
            flat = [each[wanted] for each in flat]
        return Step(flat[0], flat[1].float() if states else None)

    def _mask(self, positions: torch.Tensor, seen: torch.Tensor | None) -> Any:
        """What the model takes as its attention mask: who sees what of the cache and of the pieces themselves."""
        if seen is None and not any(kind.window for kind in self._columns):
            # One token a text, as in plain decoding: the same mask, so the same kernels.
            places = self._columns[0].places
            if all(length == places.shape[1] for length in self._lengths):
                return None
            return torch.cat([places >= 0, positions >= 0], 1).long()
        own = torch.ones_like(positions, dtype=torch.bool)[:, None] if seen is None else seen
        masks = {}
        for kind in self._columns:
            new = own
            if kind.window:
                new = own & (positions[:, None] > positions[:, :, None] - kind.window)
            whole = torch.cat([kind.visible(positions), new], 2)[:, None]
            if self._eager:
                dtype = self._engine.module.dtype
                whole = torch.zeros((), dtype=dtype, device=whole.device).masked_fill(~whole, torch.finfo(dtype).min)
            masks[kind.kind] = whole
        return masks if len(masks) > 1 else next(iter(masks.values()))

    # ---------------------------------------------------------------- what stays
    @torch.inference_mode()
    def keep(self, paths: Sequence[Sequence[int]]) -> None:
        width = self._last.shape[1]
        most = max(map(len, paths))
        straight = all(list(path) == list(range(most)) for path in paths)
        index = torch.zeros(0)
        if straight:
            new = self._last[:, :most]
        else:
            # Rows that keep fewer have their first token there once more, which nobody sees.
            filled = [[*path, *[0] * (most - len(path))] for path in paths]
            real = [[True] * len(path) + [False] * (most - len(path)) for path in paths]
            index = torch.tensor(filled, device=self._last.device)
            new = self._last.gather(1, index).where(torch.tensor(real, device=self._last.device), HOLE)
        for kind in self._columns:
            before = kind.places.shape[1]
            kind.places = torch.cat([kind.places, new], 1)
            if straight and most == width:
                continue

            def kept(states: torch.Tensor, before: int = before) -> torch.Tensor:
                if not straight:
                    states[:, :, before : before + most] = gathered(states[:, :, before:], index)
                return states[:, :, : before + most]

            self._change(kind, kept)
        self._lengths = [length + len(path) for length, path in zip(self._lengths, paths, strict=True)]
        self._last = self._last[:, :0]
        self._trim()
        for kind in self._columns:
            self._close_up(kind)

    @torch.inference_mode()
    def keep_rows(self, rows: Sequence[int]) -> None:
        index = torch.tensor(rows, device=self._engine.device)
        self._engine.keep_rows(self._cache, index)
        for kind in self._columns:
            kind.places = kind.places[index]
        self._last = self._last[index]
        self._lengths = [self._lengths[row] for row in rows]

    def _trim(self) -> None:
        """Drop what no window reaches any more: columns at the front."""
        for kind in self._columns:
            if kind.window and max(self._lengths) >= kind.window:
                coming = torch.tensor(self._lengths, device=kind.places.device)[:, None]
                gone = int((kind.places > coming - kind.window).any(0).to(torch.uint8).argmax())
                if gone:
                    kind.places = kind.places[:, gone:]
                    self._change(kind, lambda states, gone=gone: states[:, :, gone:])  # type: ignore[misc]

    def _close_up(self, kind: Columns) -> None:
        """Move every row's tokens to the right where holes have become many."""
        wanted, held = kind.needed(self._lengths), kind.places.shape[1]
        if held - wanted <= max(FREE_HOLES, HOLES_SHARE * held):
            return
        order = (kind.places >= 0).to(torch.uint8).argsort(dim=1, stable=True)[:, -wanted:]
        kind.places = kind.places.gather(1, order)
        self._change(kind, lambda states: gathered(states, order))

    def _change(self, kind: Columns, change: Any) -> None:
        for number in kind.layers:
            layer = self._cache.layers[number]
            layer.keys, layer.values = change(layer.keys), change(layer.values)


def _packed(pieces: Sequence[Chunk]) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any], np.ndarray[Any, Any] | None]:
    """A batch of pieces, padded on the right.

    Returns:
        Ids and positions, int64 `[2, batch, width]`; who sees whom, bool `[batch, width, width]` (padding sees itself: attention to
        nothing is not a number); where the real tokens are in `batch * width`, int64, or None: there is no padding.
    """
    width = max(len(piece.tokens) for piece in pieces)
    numbers = np.zeros((2, len(pieces), width), dtype=np.int64)
    seen = np.zeros((len(pieces), width, width), dtype=bool)
    seen[:] = np.eye(width, dtype=bool)
    real = []
    for row, piece in enumerate(pieces):
        count = len(piece.tokens)
        numbers[0, row, :count] = piece.tokens
        if piece.parents is None:
            numbers[1, row, :count] = np.arange(piece.start, piece.start + count)
            seen[row, :count, :count] = np.tri(count, dtype=bool)
        else:
            for index, parent in enumerate(piece.parents):
                if parent >= 0:
                    seen[row, index] |= seen[row, parent]
            numbers[1, row, :count] = piece.start - 1 + seen[row, :count].sum(1)
        real.append(np.arange(row * width, row * width + count))
    full = all(len(each) == width for each in real)
    return numbers, seen, None if full else np.concatenate(real)


@contextmanager
def states_of(module: Any, wanted: bool) -> Iterator[list[torch.Tensor]]:
    """What a model's decoder gives its head in the passes of this block, `[batch, seq, hidden]` each; nothing unless it is wanted."""
    found: list[torch.Tensor] = []
    if not wanted:
        yield found
        return

    def note(decoder: Any, arguments: Any, output: Any) -> None:
        found.append(output[0])

    hook = module.get_decoder().register_forward_hook(note)
    try:
        yield found
    finally:
        hook.remove()
