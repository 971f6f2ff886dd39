"""Double Sparsity: few channels of the keys, kept beside the cache, say which tokens to read."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from runtime.config.settings import Natural, calibrated
from runtime.kv_cache.layer_state import LayerState
from runtime.kv_cache.pages import PAGE, Pages, PageTensor
from runtime.kv_cache.region import Chosen, Queries, Region
from runtime.kv_cache.selection.base import Budget, Selection
from runtime.kv_cache.selection.layout import Layout, with_ends
from runtime.kv_cache.shape import Shape

_LEVELS = 127
_SCALE = torch.float16
_LARGEST = torch.finfo(_SCALE).max


@dataclass(frozen=True, kw_only=True)
class DoubleSparsity(Budget):
    """A head reads the tokens that score highest in its heavy channels (Double Sparsity, arXiv 2408.07092).

    A token's label is those channels of its key as 8 bit integers with one scale: of a head of 128 channels 18 bytes for 16 of them,
    where keys and values in 16 bits are 512.

    Attributes:
        channels: `[layers][kv_heads][heavy channels]`, found by calibration; as many for every head.
        skip_layers: first layers, which read everything.
        recent: newest tokens that are always read.
    """

    name: ClassVar[str] = "double-sparsity"
    channels: tuple[tuple[tuple[Natural, ...], ...], ...] = calibrated((((0,),),), per_head=True)
    skip_layers: Natural = 2
    recent: Natural = 32

    def __post_init__(self) -> None:
        super().__post_init__()
        counts = {len(head) for layer in self.channels for head in layer}
        if len(counts) != 1 or 0 in counts:
            raise ValueError(
                f"{self.name}.channels must be as many for every head, and at least one, not {sorted(counts)}"
            )

    def check_shape(self, shape: Shape) -> None:
        for layer, heads in zip(shape.layers, self.channels, strict=False):
            beyond = [channel for head in heads for channel in head if channel >= layer.sizes[0]]
            if beyond:
                raise ValueError(f"{self.name}.channels channel {beyond[0]} is outside the head size {layer.sizes[0]}")

    def begin(self, layers: int) -> DoubleSparsitySelection:
        """Raises ValueError where channels are those of another number of layers."""
        if len(self.channels) != layers:
            raise ValueError(
                f"{self.name}.channels are those of {len(self.channels)} layers, and the cache has {layers}"
            )
        return DoubleSparsitySelection(self, layers)


class _Labels(Pages):
    """Labels of one layer's tokens in the order of arrival.

    Args:
        channels: int64 `[rows, heavy channels]`.

    Attributes:
        seen: tokens of the layer, padding included, when they were last complete.
    """

    def __init__(self, channels: torch.Tensor) -> None:
        parts = {"codes": PageTensor(channels.shape[1], torch.int8), "scale": PageTensor(1, _SCALE)}
        super().__init__(len(channels), parts, channels.device)
        self.channels, self.seen = channels, 0

    def before(self, ends: torch.Tensor) -> _Labels:
        """Those of tokens before the positions `ends`, int64 `[rows]`."""
        self.crop(ends)
        return self


class DoubleSparsitySelection(Selection[DoubleSparsity]):
    """Labels of one cache's tokens, and what steps read by them."""

    def _choose(self, layer: LayerState, queries: Queries, layout: Layout) -> list[Chosen | None]:
        options, query = self.options, queries.states
        labels = self._complete(layer, layout, queries)
        recent = max(options.recent, queries.count)
        found = query.float().take_along_dim(labels.channels.unsqueeze(1), 2)
        table = labels.table.clamp(min=0)
        codes, scales = (labels.pools[name][table].flatten(1, 2)[:, : layout.longest] for name in ("codes", "scale"))
        logits = queries.scores(found @ codes.float().transpose(1, 2) * scales.float().transpose(1, 2))
        bias = layout.bias()
        if bias is not None:
            logits = logits + bias[:, None, : logits.shape[2]]
        picked = options.pick(queries.votes(logits, layout.lengths), layout.lengths, layout.longest, 0, recent)
        return layout.chosen(with_ends(picked, layout.lengths, 0, recent))

    def _channels(self, layer: LayerState, query: torch.Tensor) -> torch.Tensor:
        """int64 `[rows, heavy channels]`."""
        calibrated = self.options.channels[layer.index]
        batch, heads = layer.shape
        what = f"{self.options.name}.channels of layer {layer.index}"
        if len(calibrated) != heads:
            raise ValueError(f"{what} are those of {len(calibrated)} heads, and it has {heads}")
        if max(map(max, calibrated)) >= query.shape[2] or min(map(min, calibrated)) < 0:
            raise ValueError(f"{what} must be in [0, {query.shape[2]})")
        return torch.tensor(calibrated, device=query.device).repeat(batch, 1)

    def _complete(self, layer: LayerState, layout: Layout, queries: Queries) -> _Labels:
        """Labels of all tokens, those of new ones added."""
        labels: _Labels | None = self._recall(layer, layout)
        usual = queries.count == 1 and queries.counted is None and not self._watches[layer.index].taken
        usual = usual and labels is not None and layer.seen == labels.seen
        if labels is None:
            labels = self._known[layer.index] = _Labels(self._channels(layer, queries.states))
        labels.seen, channels = layer.seen + queries.count, labels.channels
        if usual:
            # The common step: one token more in every row, so that no number need be fetched from the device.
            codes, scales = quantized(_newest(layout.regions[-1]).gather(1, channels))
            labels.append_one({"codes": codes, "scale": scales})
            return labels
        counts = layout.lengths - labels.lengths
        most = int(counts.max())
        if not most:
            return labels
        codes = torch.zeros(len(counts), most, channels.shape[1], dtype=torch.int8, device=counts.device)
        scales = torch.zeros(len(counts), most, 1, dtype=_SCALE, device=counts.device)
        for keys, rows, places in layout.since(labels.lengths):
            at = rows, places - labels.lengths[rows]
            codes[at], scales[at] = quantized(keys.gather(1, channels[rows]))
        labels.append({"codes": codes, "scale": scales}, counts)
        return labels


def _newest(tail: Region) -> torch.Tensor:
    """The key of each row's newest token, `[rows, size]`."""
    rows, places = torch.arange(len(tail.lengths), device=tail.device), tail.lengths - 1
    return tail.page_keys(tail.table[rows, places // PAGE])[rows, places % PAGE]


def quantized(label: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Labels `[n, channels]` as int8 codes and float16 scales `[n, 1]`: label = code * scale."""
    exact = label.float()
    # Rounded on the scale as stored, which must not become 0 or infinite in 16 bits.
    scale = (exact.abs().amax(-1, keepdim=True) / _LEVELS).clamp(1e-7, _LARGEST).to(_SCALE)
    return (exact / scale.float()).round().clamp(-_LEVELS, _LEVELS).to(torch.int8), scale
