"""Nested widths: the first channels of every feed-forward network are a model by themselves, for each of some shares of them."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from compress.core.tensors import relative
from compress.distill.recover.losses import Recovering
from compress.distill.recover.outputs import Outputs
from compress.distill.train.data import Batch, mix
from compress.distill.train.loop import Sums, add_sums
from compress.model.config_sizes import resized, size_of
from compress.model.couplings import Channels, changed, channels_of, input_dim, layouts
from compress.model.module_hooks import hooks
from compress.model.streamed import StreamedModel
from runtime.errors import RequestError
from runtime.modeling.skeleton import build_skeleton

_SAME = 1e-3  # float32 sums in another order


class Nested(Recovering):
    """A model whose prefixes are trained with it. Every forward pass in training has one width, drawn by the seed of its first row, as
    in the paper; held-out rows are measured at all of them.

    Args:
        model, streamed, config, layers: as of `Recovering`; the config is a `MatFormerConfig`.
    """

    def __init__(self, model: Any, streamed: StreamedModel, config: Any, layers: Sequence[int]) -> None:
        super().__init__(model, streamed, config, layers)
        self._channels = (feed_forward(streamed),)
        count = self._channels[0][0].count
        self.widths = [max(1, round(share * count)) for share in config.widths]
        self.width = count
        # They stay, as activations may be computed again after a forward pass, and must be what they were.
        for channels in self._channels[0]:
            narrow = partial(self._narrow, channels.columns.each)
            model.get_submodule(channels.consumer).register_forward_pre_hook(narrow)

    def forward(self, batch: Batch, targets: Outputs | None) -> tuple[torch.Tensor, torch.Tensor]:
        """As `Recovering.forward`, at one width."""
        self.width = self.widths[mix(int(batch.seeds[0])) % len(self.widths)]
        return super().forward(batch, targets)

    @torch.no_grad()
    def measure(self, batch: Batch, targets: Outputs | None) -> Sums:
        """As `Recovering.measure`: means over the widths, and "loss_256", ... of each number of channels."""
        sums: Sums = {}
        for width in self.widths:
            self.width = width
            found = super().measure(batch, targets)
            add_sums(sums, found)
            sums |= {f"{name}_{width}": value for name, value in found.items()}
        return sums

    def _narrow(self, each: int, _module: nn.Module, args: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        """Nothing reads the channels after the first `self.width`."""
        value, columns = args[0], self.width * each
        if columns >= value.shape[-1]:
            return args
        return (nn.functional.pad(value[..., :columns], (0, value.shape[-1] - columns)), *args[1:])

    def describe(self) -> dict[str, Any]:
        """See `Learner.describe`."""
        return {**super().describe(), "widths": self.widths}


def feed_forward(streamed: StreamedModel) -> list[Channels]:
    """The channels of the feed-forward networks of all blocks, fused tensors as they most likely stand.

    Raises:
        RequestError: the model's config does not say how wide they are, no layer has one, or a network is none that can be cut.
    """
    size = size_of(streamed.config, "ffn")
    fewer = max(1, size.count // 2)
    smaller = build_skeleton(resized(streamed.config, "ffn", fewer), torch.float32, stored=streamed.checkpoint.names())
    slices = changed(streamed.model, smaller, size.count, fewer)
    found = []
    for index in range(len(streamed.blocks)):
        for channels in channels_of(streamed.model, slices, streamed.block_prefix(index), size.count):
            found.append(next(layouts(channels, size.members)))
    if not found:
        raise RequestError(
            f"no layer of a {type(streamed.model).__name__} has a feed-forward network of the {size.count} channels that its config says "
            "(its layers have experts instead), so there are no widths that could be nested; use another method"
        )
    return found


@torch.no_grad()
def order(model: Any, streamed: StreamedModel, channels: Sequence[Channels], ids: torch.Tensor) -> None:
    """Put the channels of every network in the order of their rank, the largest first: the model computes the same, and its prefixes lose
    least. Ranked by weights times the norm of what they multiply (Wanda, summed over a channel).

    Args:
        ids: int64 `[n, s]`, text to rank by.

    Raises:
        RequestError: the model computes something else then.
    """

    def given() -> torch.Tensor:
        out = streamed.call(model, (ids[:1].to(streamed.device), None))
        return out.last_hidden_state if streamed.kind == "encoder" else out.logits

    expected = given()
    squares: dict[str, torch.Tensor] = {}

    def watch(name: str, _module: nn.Module, args: tuple[torch.Tensor, ...]) -> None:
        squares[name] = squares.get(name, torch.zeros(())) + args[0].float().square().flatten(0, -2).sum(0).cpu()

    with hooks({model.get_submodule(own.consumer): partial(watch, own.consumer) for own in channels}, before=True):
        for rows in ids.split(4):
            streamed.call(model, (rows.to(streamed.device), None))
    for own in channels:
        layer = model.get_submodule(own.consumer)
        weight = layer.weight.detach().float().cpu()
        weight = weight if input_dim(layer) == 1 else weight.T
        score = (weight.abs().sum(0) * squares[own.consumer].sqrt()).view(own.count, -1).sum(1)
        ranked = score.argsort(descending=True, stable=True)
        for part in own.slices:
            held = model.get_parameter(part.name)
            held.data = part.cut(held.data, ranked).contiguous()
    if not (difference := relative(given(), expected)) < _SAME:
        raise RequestError(
            f"a {type(model).__name__} computes something else when its channels are put in another order (relative difference "
            f"{difference:.1e}); set order: false"
        )
