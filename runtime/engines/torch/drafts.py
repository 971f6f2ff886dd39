"""Pools of transformers' modules in which drafts are verified: token trees over a plain cache, chains over a compressed one.

One pass computes a batch of trees, whose branches a mask keeps apart. What is accepted of each row differs, so that the cache gets
holes, which nothing sees; when they are too many all rows close up.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from runtime.engines.base import Chunk
from runtime.engines.rows import RowEngine, RowPool, flat, pad_left
from runtime.errors import first_line
from runtime.kv_cache import drafts
from runtime.kv_cache.layer import CompressedLayer

if TYPE_CHECKING:
    from transformers import PreTrainedModel

MOST_ROWS = 512
# Holes that a row of the cache may always have, and as a share of its columns.
FREE_HOLES = 16
HOLES_SHARE = 0.25
_MASKS = ("sdpa", "eager")  # attention functions that take any mask

HOLE = -1  # the place of what a column holds and nobody may see
_KINDS = {"full_attention", "sliding_attention"}


@dataclass(eq=False)
class Columns:
    """Layers whose caches have the same columns, since they see equally far.

    Attributes:
        layers: their indices.
        window: tokens that each token sees, its own included; 0: all before it.
        places: int64 `[batch, columns]`: the position in its sequence of what a column holds, or `HOLE`.
    """

    layers: list[int]
    window: int
    places: torch.Tensor


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
        found.setdefault(window, Columns([], window, empty)).layers.append(index)
    if len(found) - (0 in found) > 1:
        return "has layers with sliding windows of several sizes"
    return list(found.values())


def gathered(states: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """The columns `index` `[batch, n]` of keys or values `[batch, heads, columns, size]`."""
    return states.gather(2, index[:, None, :, None].expand(-1, states.shape[1], -1, states.shape[3]))


def why_not(module: PreTrainedModel, places: bool) -> str | None:
    """Why drafts cannot be verified for a model over a plain cache, as its class and its config say; None: nothing is against it.

    Args:
        places: whether padding changes nothing for its tokens, since they are given their positions.
    """
    config = module.config.get_text_config(decoder=True)
    name = type(module).__name__
    found = columns(config)
    if isinstance(found, str):
        return f"{name} {found}"
    if not places:
        return f"{name} takes no positions, and counts tokens by the columns of its cache, which drafts leave holes in"
    if getattr(config, "alibi", False) or "local" in (getattr(config, "attention_layers", None) or ()):
        return f"{name} counts distances by the columns of its cache, which drafts leave holes in"
    if getattr(config, "num_kv_shared_layers", None) or "reuse" in (getattr(config, "kv_sharing_modes", None) or ()):
        return f"{name} has layers that share the cache of others"
    implementation = getattr(config, "_attn_implementation", None)
    if implementation not in _MASKS:
        return f"{name} computes attention with {implementation!r}, which does not take the mask of a token tree"
    return None


class DraftPool(RowPool):
    """Base class: rows that keep a path of their last draft, which the next step or drop settles.

    Args:
        engine: that computes.
        module: its model, whose decoder gives hidden states.
    """

    def __init__(self, engine: RowEngine, module: PreTrainedModel, cache: Any = None) -> None:
        super().__init__(engine, cache)
        self._module = module
        self._width = 0  # tokens of a row in the last pass, as far as they are not settled

    def _pass(
        self, ids: torch.Tensor, positions: torch.Tensor, mask: Any, last_only: bool, hidden: bool
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        if not hidden:
            return super()._pass(ids, positions, mask, last_only, hidden)
        with states_of(self._module) as states:
            logits, _ = super()._pass(ids, positions, mask, last_only, hidden)
        # Tokens that a policy puts before the prompt are nobody's.
        return logits, states[0][:, -ids.shape[1] :].float()

    def settle(self) -> None:
        """Of the last pass only what was accepted stays."""
        if self._width:
            self.keep_paths([[0, *(1 + node for node in self.paths.get(page, ()))] for page in self.pages])
        self.paths.clear()
        self._width = 0

    def keep_paths(self, paths: Sequence[Sequence[int]]) -> None:
        """Of each row's last pass these tokens stay: ascending indices, 0 (the sequence's own last token) first, one branch."""
        raise NotImplementedError


class TreePool(DraftPool):
    """Rows over a plain cache, whose chunks may be trees."""

    def __init__(self, engine: RowEngine, module: PreTrainedModel) -> None:
        from transformers import DynamicCache

        # Not of the model's config: windows are cut here, where it is known which token is in which column.
        super().__init__(engine, module, DynamicCache())
        config = module.config.get_text_config(decoder=True)
        found = columns(config)
        assert not isinstance(found, str), "asked of why_not before"
        self._eager = config._attn_implementation == "eager"
        self._columns = found
        self._lengths: list[int] = []
        self._last = torch.zeros(0, 0, dtype=torch.int64)  # positions of the last pass `[batch, width]`, on the device

    # ---------------------------------------------------------------- passes
    @torch.inference_mode()
    def _begin(self, chunks: Sequence[Chunk], every: bool, hidden: bool) -> tuple[torch.Tensor, torch.Tensor | None]:
        ids, mask, positions = pad_left([chunk.tokens for chunk in chunks], self.engine.device)
        logits, states = self._pass(ids, positions, mask, True, hidden)
        places = positions if mask is None else positions.masked_fill(mask == 0, HOLE)
        for kind in self._columns:
            kind.places = places
        self._lengths = [len(chunk.tokens) for chunk in chunks]
        self._last = places[:, :0]
        self._close_up()
        if states is not None:
            states = states.flatten(0, 1) if mask is None else states[mask > 0]
        return logits[:, -1], states

    @torch.inference_mode()
    def _extend(self, chunks: Sequence[Chunk], every: bool, hidden: bool) -> tuple[torch.Tensor, torch.Tensor | None]:
        self.settle()
        device = self.engine.device
        self._lengths = [chunk.start for chunk in chunks]
        seen = real = None
        if all(len(chunk.tokens) == 1 for chunk in chunks):
            ids, positions = torch.tensor([[[c.tokens[0]] for c in chunks], [[c.start] for c in chunks]], device=device)
        else:
            numbers, tree, real = _packed(chunks)
            ids, positions = torch.from_numpy(numbers).to(device)
            seen = torch.from_numpy(tree).to(device)
        logits, states = flat(*self._pass(ids, positions, self._seen(positions, seen), False, hidden))
        self._last, self._width = positions, positions.shape[1]
        if real is None:
            return logits, states
        wanted = torch.from_numpy(real).to(device)
        return logits[wanted], None if states is None else states[wanted]

    def _seen(self, positions: torch.Tensor, seen: torch.Tensor | None) -> Any:
        """What the model takes as its attention mask: who sees what of the cache and of the chunks themselves."""
        if seen is None and not any(kind.window for kind in self._columns):
            # One token a sequence, as in plain decoding: the same mask, so the same kernels.
            places = self._columns[0].places
            if all(length == places.shape[1] for length in self._lengths):
                return None
            return torch.cat([places >= 0, positions >= 0], 1).long()
        own = torch.ones_like(positions, dtype=torch.bool)[:, None] if seen is None else seen
        masks = {}
        for kind in self._columns:
            whole = torch.cat([(kind.places >= 0)[:, None].expand(-1, positions.shape[1], -1), own], 2)
            if kind.window:
                whole &= torch.cat([kind.places, positions], 1)[:, None] > positions[:, :, None] - kind.window
            whole = whole[:, None]
            if self._eager:
                dtype = self._module.dtype
                whole = torch.zeros((), dtype=dtype, device=whole.device).masked_fill(~whole, torch.finfo(dtype).min)
            masks["sliding_attention" if kind.window else "full_attention"] = whole
        return masks if len(masks) > 1 else next(iter(masks.values()))

    # ---------------------------------------------------------------- what stays
    @torch.inference_mode()
    def keep_paths(self, paths: Sequence[Sequence[int]]) -> None:
        width = self._last.shape[1]
        most = max(map(len, paths))
        straight = all(list(path) == list(range(most)) for path in paths)
        # Rows that keep fewer have their first token there once more, which nobody sees.
        filled = [[*path, *[0] * (most - len(path))] for path in paths]
        real = [[place < len(path) for place in range(most)] for path in paths]
        index = torch.tensor(filled, device=self._last.device)
        new = self._last.gather(1, index).where(torch.tensor(real, device=self._last.device), HOLE)
        for kind in self._columns:
            before = kind.places.shape[1]
            kind.places = torch.cat([kind.places, new], 1)
            if straight and most == width:
                continue

            def accepted(states: torch.Tensor, before: int = before) -> torch.Tensor:
                if not straight:
                    states[:, :, before : before + most] = gathered(states[:, :, before:], index)
                return states[:, :, : before + most]

            self._change(kind, accepted)
        self._lengths = [length + len(path) for length, path in zip(self._lengths, paths, strict=True)]
        self._last = self._last[:, :0]
        self._close_up()

    @torch.inference_mode()
    def _drop(self, rows: Sequence[int]) -> None:
        super()._drop(rows)
        index = torch.tensor(rows, device=self.engine.device)
        for kind in self._columns:
            kind.places = kind.places[index]
        self._last = self._last[index]
        self._lengths = [self._lengths[row] for row in rows]

    def _close_up(self) -> None:
        """Move every row's tokens to the right where columns have become many that hold nothing, or what no window reaches."""
        for kind in self._columns:
            wanted, present = max(min(length, kind.window or length) for length in self._lengths), kind.places.shape[1]
            if present - wanted > max(FREE_HOLES, HOLES_SHARE * present):
                order = (kind.places >= 0).to(torch.uint8).argsort(dim=1, stable=True)[:, -wanted:]
                kind.places = kind.places.gather(1, order)
                self._change(kind, partial(gathered, index=order))

    def _change(self, kind: Columns, change: Any) -> None:
        for number in kind.layers:
            layer = self.cache.layers[number]
            layer.keys, layer.values = change(layer.keys), change(layer.values)


class ChainPool(DraftPool):
    """One row over a compressed cache, whose chunks are chains."""

    @torch.inference_mode()
    def _begin(self, chunks: Sequence[Chunk], every: bool, hidden: bool) -> tuple[torch.Tensor, torch.Tensor | None]:
        assert len(chunks) == 1, "sequences over compressed caches are decoded one by one"
        found = super()._begin(chunks, every, hidden)
        for layer in self.cache.layers:
            # Sliding windows keep what they no longer need until it is known what is taken back. The prompt stays.
            if not isinstance(layer, CompressedLayer) and hasattr(layer, "activate_past_recording"):
                layer.activate_past_recording()
        return found

    @torch.inference_mode()
    def _extend(self, chunks: Sequence[Chunk], every: bool, hidden: bool) -> tuple[torch.Tensor, torch.Tensor | None]:
        assert chunks[0].parents is None, "chains only"
        self.settle()
        self._width = len(chunks[0].tokens)
        return super()._extend(chunks, True, hidden)

    @torch.inference_mode()
    def keep_paths(self, paths: Sequence[Sequence[int]]) -> None:
        (path,) = paths
        self.cache.crop(len(path) - self._width)

    def room(self) -> int:
        """How many drafted tokens the next pass may verify, so that each is computed as it would be alone."""
        self.settle()
        return drafts.room(self.cache)


def _packed(chunks: Sequence[Chunk]) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any], np.ndarray[Any, Any] | None]:
    """A batch of chunks, padded on the right.

    Returns:
        Ids and positions, int64 `[2, batch, width]`; who sees whom, bool `[batch, width, width]` (padding sees itself: attention to
        nothing is not a number); where the real tokens are in `batch * width`, int64, or None: there is no padding.
    """
    width = max(len(chunk.tokens) for chunk in chunks)
    numbers = np.zeros((2, len(chunks), width), dtype=np.int64)
    seen = np.zeros((len(chunks), width, width), dtype=bool)
    seen[:] = np.eye(width, dtype=bool)
    real = []
    for row, chunk in enumerate(chunks):
        count = len(chunk.tokens)
        numbers[0, row, :count] = chunk.tokens
        if chunk.parents is None:
            numbers[1, row, :count] = np.arange(chunk.start, chunk.start + count)
            seen[row, :count, :count] = np.tri(count, dtype=bool)
        else:
            for index, parent in enumerate(chunk.parents):
                if parent >= 0:
                    seen[row, index] |= seen[row, parent]
            numbers[1, row, :count] = chunk.start - 1 + seen[row, :count].sum(1)
        real.append(np.arange(row * width, row * width + count))
    full = all(len(each) == width for each in real)
    return numbers, seen, None if full else np.concatenate(real)


@contextmanager
def states_of(module: Any) -> Iterator[list[torch.Tensor]]:
    """What a model's decoder gives its head in the passes of this block, `[batch, seq, hidden]` each."""
    found: list[torch.Tensor] = []
    with module.get_decoder().register_forward_hook(lambda decoder, arguments, output: found.append(output[0])):
        yield found


# Of logits, relative to how much they differ among tokens. A branch that sees another, or is at another place, is far off.
_BOUND, _BOUND_16_BITS = 0.02, 0.1
_PROMPTS = (3, 5)
_STARTS = (11, 23, 57)
# Of each chunk. The branches of the leaves are equally long.
_PARENTS = ([-1, 0, 0, 1, 2, 4], [-1, 0])
_LEAVES = ((0, 2, 4, 5), (0, 1))


@torch.inference_mode()
def probe(engine: RowEngine, module: PreTrainedModel) -> str | None:
    """What goes wrong when two trees are verified together; None: nothing."""
    name = type(module).__name__
    bound = _BOUND if module.dtype == torch.float32 else _BOUND_16_BITS
    least = float("inf")
    # Where 16 bits send a token to another expert, numbers are far off too, but not of every text.
    for start in _STARTS:
        try:
            off = _error(engine, module, start)
        except (RuntimeError, TypeError, ValueError, KeyError, IndexError, AttributeError) as error:
            return f"{name} does not take the mask of a token tree: {first_line(error)}"
        if off < bound:
            return None
        least = min(least, off)
    return f"{name} does not compute the branches of a draft as if they were alone: its logits are off by {least:.2g}"


def _error(engine: RowEngine, module: PreTrainedModel, start: int) -> float:
    """How far logits after two leaves are from those of the branches alone, for sequences of tokens that begin with `start`."""
    pool, device = TreePool(engine, module), engine.device
    ids = ((torch.arange(2 * 16).view(2, 16) * 7919 + start) % engine.vocab_size).tolist()
    longest = max(_PROMPTS)
    prompts = [row[longest - count : longest] for row, count in zip(ids, _PROMPTS, strict=True)]
    pool.run([Chunk(prompt, 0, (row,)) for row, prompt in enumerate(prompts)], hidden=True)
    chunks = [
        Chunk(row[longest : longest + len(parents)], count, (number,), len(parents), parents)
        for number, (row, count, parents) in enumerate(zip(ids, _PROMPTS, _PARENTS, strict=True))
    ]
    found = pool.run(chunks, hidden=True)[0]
    leaves = zip(prompts, chunks, _LEAVES, strict=True)
    whole = [[*prompt, *(chunk.tokens[index] for index in leaf)] for prompt, chunk, leaf in leaves]
    expected = engine.forward(torch.tensor(whole, device=device), None, None, None, True)[:, -1]
    rows = [_LEAVES[0][-1], len(_PARENTS[0]) + _LEAVES[1][-1]]
    spread = (expected - expected.mean(-1, keepdim=True)).norm(dim=-1)
    return float(((found[rows] - expected).norm(dim=-1) / spread.clamp(min=1e-12)).max())
