"""Norms over the hidden state: which modules are norms, the share of each dimension in their mean square, and weights over fewer.

A norm divides by a root mean square (or standard deviation) over all dimensions. Over fewer it divides by another one, so its weight is
multiplied by the ratio of the two, as calibration sequences show it.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from compress.model.couplings import Slices, input_dim, is_input
from compress.model.hidden_states import HiddenStates
from compress.model.input_statistics import collect, find_groups, forwards
from compress.model.module_hooks import hooks
from compress.model.streamed import Batch
from compress.prune.structure.removal import Cut, Pass, Tensors, check_finite
from runtime.errors import CompressError, RequestError

_CLOSE = 1e-3
_SHARES = "shares."


@dataclass(frozen=True)
class Norm:
    """A module that divides its input by its size.

    Attributes:
        name: of the module.
        offset: what it adds to its weight before it multiplies with it: 1 in Gemma's, else 0.
        centred: whether it takes the mean away first.
    """

    name: str
    offset: float
    centred: bool

    def scaled(self, weight: torch.Tensor, factor: float) -> torch.Tensor:
        """The weight with which its output is `factor` times what it was, in the weight's dtype."""
        return ((weight.float() + self.offset) * factor - self.offset).to(weight.dtype)

    def shares(self, x: torch.Tensor) -> torch.Tensor:
        """Of inputs `[tokens, dimensions]` the square of each dimension over the mean square of all, summed over tokens: float64
        `[dimensions]`. Tokens of zeros are left out."""
        x = x.double()
        if self.centred:
            x = x - x.mean(1, keepdim=True)
        squares = x.square()
        whole = squares.mean(1, keepdim=True)
        return torch.where(whole > 0, squares / whole.clamp_min(1e-300), 0.0).sum(0)


class HiddenCut(Cut):
    """The cut of tensors to fewer dimensions of the hidden state.

    Args:
        slices: parts of tensors that belong to dimensions. kept: int64, ascending, which of `count` stay.
        norms: by name. gains: {norm: what its output is multiplied by}.

    Attributes:
        scales: {tensor: what it is multiplied by}.
    """

    def __init__(
        self, slices: Iterable[Slices], kept: torch.Tensor, count: int, norms: dict[str, Norm], gains: dict[str, float]
    ) -> None:
        super().__init__((part, kept) for part in slices)
        self.kept, self.count, self.norms, self.gains = kept, count, norms, gains
        self.scales: dict[str, float] = {}

    def __call__(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor as the smaller model has it, in its own dtype; CompressError where it holds NaN or Inf."""
        check_finite({name: tensor})
        tensor = super().__call__(name, tensor)
        module, _, leaf = name.rpartition(".")
        if leaf == "weight" and module in self.norms:
            tensor = self.norms[module].scaled(tensor, self.gains.get(module, 1.0))
        scale = self.scales.get(name, 1.0)
        return tensor if scale == 1.0 else (tensor.float() * scale).to(tensor.dtype)


def find_norms(model: nn.Module, slices: Iterable[Slices]) -> dict[str, Norm]:
    """The norms over the units of `slices` (dimensions of the hidden state), by name.

    A module is a norm if its output stays the same when its input is scaled; other vectors (scales of a layer) are none.

    Raises:
        RequestError: a norm that neither multiplies by its weight nor by one plus it.
    """
    found = {}
    for name, _, leaf in (part.name.rpartition(".") for part in slices):
        module = model.get_submodule(name)
        if leaf != "weight" or input_dim(module) is not None or isinstance(module, nn.Embedding):
            continue
        weight = module._parameters["weight"]
        assert weight is not None
        norm = _tried(module, name, len(weight)) if weight.dim() == 1 else None
        if norm is not None:
            found[name] = norm
    return found


@torch.no_grad()
def _tried(module: nn.Module, name: str, width: int) -> Norm | None:
    trial = copy.deepcopy(module).to_empty(device="cpu").float()
    x = 10 * torch.randn(4, 1, width, generator=torch.Generator().manual_seed(0))

    def given(weight: float, value: torch.Tensor) -> torch.Tensor:
        for key, parameter in trial.named_parameters():
            parameter.fill_(weight if key == "weight" else 0.0)
        result = trial(value)
        assert isinstance(result, torch.Tensor)
        return result

    try:
        one, more = given(1.0, x), given(1.0, 4 * x)
    except (TypeError, RuntimeError, ValueError):  # it takes more than hidden states
        return None
    if one.shape != x.shape or not _alike(more, one):
        return None
    none = given(0.0, x)
    offset = float((none * (one - none)).sum() / (one - none).square().sum().clamp_min(1e-12))
    if min(abs(offset), abs(offset - 1)) > _CLOSE:
        raise RequestError(f"{name} ({type(module).__name__}) multiplies neither by its weight nor by one plus it")
    return Norm(name, float(round(offset)), _alike(given(1.0, x + 10), one))


def _alike(value: torch.Tensor, reference: torch.Tensor) -> bool:
    return float((value - reference).norm()) <= _CLOSE * float(reference.norm())


def gain(shares: torch.Tensor, kept: torch.Tensor) -> float:
    """The factor of a norm's output when only these dimensions are there: their root mean square over that of all.

    Args:
        shares: mean over tokens of `Norm.shares`, `[dimensions]`; zeros where nothing was seen.
    """
    return float(shares[kept].mean().sqrt()) if bool(shares.any()) else 1.0


# ---------------------------------------------------------------- calibration statistics
def measure(run: Pass, norms: dict[str, Norm]) -> tuple[torch.Tensor | None, dict[str, torch.Tensor]]:
    """One pass over the model, done once for a run and those that resume it.

    Returns:
        Float32 `[dimensions]`: mean size of each where layers of the blocks read it, over the mean of all, mean over inputs; None: no
        linear layer of a block reads the hidden state. And {norm: float64 `[dimensions]`}, mean over tokens of `Norm.shares`, of norms
        that sequences reach.

    Raises:
        CompressError: the hidden states hold NaN or Inf.
    """
    found = run.tensors_once("measured.safetensors", lambda: _measure(run, norms))
    states = found.pop("states", None)
    return states, {name.removeprefix(_SHARES): value for name, value in found.items()}


def _measure(run: Pass, norms: dict[str, Norm]) -> Tensors:
    streamed, batches = run.streamed, run.batches
    readers = {s.name.removesuffix(".weight") for s in run.job.slices if is_input(streamed.model, s)}
    linear = {name for name in readers if isinstance(streamed.model.get_submodule(name), nn.Linear)}
    outside = {name for name in norms if not streamed.is_inside(name)}
    watch = _Watch(streamed.model, norms)
    sizes: list[torch.Tensor] = []

    def visit(index: int, states: HiddenStates) -> str:
        prefix = streamed.block_prefix(index)
        inside = {name for name in norms if name.startswith(prefix)}
        # Norms outside of the blocks that have been seen would now run over other ids.
        between = inside | (outside - watch.total.keys())
        runs = forwards(streamed, index, states, batches)
        reading = [name.removeprefix(prefix) for name in linear if name.startswith(prefix)]
        sizes.extend(_sizes(streamed.blocks[index], prefix, reading, runs))
        for number, batch in enumerate(batches):
            with watch.on(between, batch[1]):
                states.put(number, streamed.advance(index, states.get(number), batch))
        if index + 1 == len(streamed.blocks):
            last, tail = (
                outside - watch.total.keys(),
                streamed.outputs if streamed.kind == "encoder" else streamed.head_input,
            )
            for number, (ids, mask) in enumerate(batches):
                with watch.on(last, mask):
                    tail(states.get(number).to(streamed.device), ids)
        return ""

    def before(batch: Batch) -> AbstractContextManager[None]:
        return watch.on(outside, batch[1])

    run.visit("hidden states", batches, visit, before)
    shares = {_SHARES + name: value for name, value in watch.finish().items()}
    return shares | ({"states": torch.stack(sizes).mean(0)} if sizes else {})


def _sizes(block: nn.Module, prefix: str, readers: Collection[str], runs: Any) -> list[torch.Tensor]:
    """Mean size of each dimension, over the mean of all, of each input that some of these layers share: float32 `[dimensions]`."""
    groups = find_groups(block, runs[0][0], readers)
    found = []
    for group, statistics in zip(groups, collect(block, groups, runs, needs=()) if groups else [], strict=True):
        if not statistics.finite:
            raise CompressError(f"{prefix}{group.members[0]}: its calibration inputs hold NaN or Inf")
        mean = statistics.abs_mean.cpu()
        found.append(mean / mean.mean().clamp_min(1e-30))
    return found


class _Watch:
    """Collects the shares of norms, by name."""

    def __init__(self, model: nn.Module, norms: dict[str, Norm]) -> None:
        self._model, self._norms = model, norms
        self.total: dict[str, torch.Tensor] = {}
        self._tokens: dict[str, int] = {}

    def on(self, names: Collection[str], mask: torch.Tensor | None) -> AbstractContextManager[None]:
        """Watch these norms over a batch; `mask` `[b, s]` marks its tokens."""
        return hooks({self._model.get_submodule(name): self._hook(name, mask) for name in names}, before=True)

    def _hook(self, name: str, mask: torch.Tensor | None) -> Callable[..., None]:
        def hook(_module: nn.Module, args: tuple[torch.Tensor, ...]) -> None:
            x = args[0].detach().reshape(-1, args[0].shape[-1])
            if mask is not None and mask.numel() == len(x):
                x = x[mask.reshape(-1).to(x.device)]
            self.total[name] = self.total.get(name, 0) + self._norms[name].shares(x).cpu()
            self._tokens[name] = self._tokens.get(name, 0) + len(x)

        return hook

    def finish(self) -> dict[str, torch.Tensor]:
        """Means over tokens."""
        found = {name: value / max(self._tokens[name], 1) for name, value in self.total.items()}
        for name, value in found.items():
            if not bool(torch.isfinite(value).all()):
                raise CompressError(f"{name}: its calibration inputs hold NaN or Inf")
        return found
