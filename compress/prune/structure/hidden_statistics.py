"""What dimensions of the hidden state hold, over calibration text: how large each is where layers read it, and its share of what norms
divide by. One pass, block by block."""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import nn

from compress.core.files import intact, seal, written_beside
from compress.model.couplings import Slices, input_dim, is_input
from compress.model.hidden_states import HiddenStates
from compress.model.input_statistics import collect, find_groups
from compress.model.streamed import Batch, StreamedModel
from compress.prune.structure.cutting import Cutting
from runtime.errors import CompressError, RequestError

# Norms over the hidden state: which modules are norms, what they do with their weight, and what fewer dimensions change of them.
#
# A norm divides by a root mean square (or standard deviation) over all dimensions. Over fewer it divides by another one, so its weight is
# multiplied by the ratio of the two, as calibration text shows it.

_CLOSE = 1e-3


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
        """Of inputs `[tokens, dimensions]` the square of each dimension over the mean square of all, mean over tokens: float64
        `[dimensions]`. Tokens of zeros are left out."""
        x = x.double()
        if self.centred:
            x = x - x.mean(1, keepdim=True)
        squares = x.square()
        whole = squares.mean(1, keepdim=True)
        return torch.where(whole > 0, squares / whole.clamp_min(1e-300), 0.0).sum(0)


def find_norms(model: nn.Module, slices: Iterable[Slices]) -> dict[str, Norm]:
    """The norms over the units of `slices` (dimensions of the hidden state), by name.

    What they do is tried: output that stays the same when the input grows makes a norm. Other vectors (scales of a layer) are none.

    Raises:
        RequestError: a norm that neither multiplies by its weight nor by one plus it.
    """
    found = {}
    for part in slices:
        name, _, leaf = part.name.rpartition(".")
        module = model.get_submodule(name)
        if leaf != "weight" or input_dim(module) is not None or isinstance(module, nn.Embedding):
            continue
        weight = module._parameters["weight"]
        assert weight is not None
        if weight.dim() == 1:
            norm = _tried(module, name, len(weight))
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
    """What a norm's output must be multiplied by when only these dimensions are there: the root mean square over them by that over all.

    Args:
        shares: mean over tokens of `Norm.shares`, `[dimensions]`; zeros where nothing was seen.
    """
    if not bool(shares.any()):
        return 1.0
    return float(shares[kept].mean().sqrt())


_SHARES = "shares."


@dataclass
class Measured:
    """What was seen.

    Attributes:
        states: float32 `[dimensions]`: mean size of each where layers of the blocks read it, over the mean of all, mean over inputs;
            None: no linear layer of a block reads the hidden state.
        shares: {norm: float64 `[dimensions]`}, mean over tokens of `Norm.shares`; of norms that text reaches.
    """

    states: torch.Tensor | None
    shares: dict[str, torch.Tensor]


def measured(cutting: Cutting, norms: dict[str, Norm]) -> Measured:
    """Measured once for a run and those that go on from it.

    Raises:
        CompressError: the hidden states hold NaN or Inf.
    """
    file = cutting.work / "measured.safetensors"
    if not intact(file):
        found = _measure(cutting, norms)
        with written_beside(file) as temporary:
            save_file(
                {_SHARES + name: value for name, value in found.shares.items()}
                | ({} if found.states is None else {"states": found.states}),
                temporary,
            )
        seal(file)
    held = load_file(file)
    return Measured(held.pop("states", None), {name.removeprefix(_SHARES): value for name, value in held.items()})


def _measure(cutting: Cutting, norms: dict[str, Norm]) -> Measured:
    streamed, slices, batches, reporter = cutting.streamed, cutting.job.slices, cutting.batches, cutting.reporter
    count = len(streamed.blocks)
    reporter.phase("structure: hidden states", count)
    readers = {s.name.removesuffix(".weight") for s in slices if is_input(streamed.model, s)}
    linear = {n for n in readers if isinstance(streamed.model.get_submodule(n), nn.Linear)}
    watch = _Watch(norms)
    outside = {name for name in norms if not streamed.is_inside(name)}
    states = cutting.states(len(batches), "measured")
    sizes: list[torch.Tensor] = []
    streamed.load_outside()
    with torch.inference_mode():
        for number, batch in enumerate(batches):
            one = HiddenStates(1)
            with watch.on(streamed.model, outside, batch[1]):
                streamed.prelude([batch], one)
            states.put(number, one.get(0))
        for index in range(count):
            prefix = streamed.block_prefix(index)
            inside = {name for name in norms if name.startswith(prefix)}
            # What is outside and has been seen runs over other ids now, where it runs again at all.
            between = outside - watch.seen
            reading = {n.removeprefix(prefix) for n in linear if n.startswith(prefix)}
            with streamed.loaded_block(index) as block:
                sizes += _sizes(streamed, index, block, reading, states, batches)
                for number, batch in enumerate(batches):
                    with watch.on(streamed.model, inside | between, batch[1]):
                        states.put(number, streamed.advance(index, states.get(number), batch))
            reporter.step(f"block {index}")
        last = outside - watch.seen
        for number, batch in enumerate(batches):
            with watch.on(streamed.model, last, batch[1]):
                state = states.get(number).to(streamed.device)
                if streamed.kind == "encoder":
                    streamed.outputs(state, batch[0])
                else:
                    streamed.head_input(state, batch[0])
    states.drop()
    return Measured(_mean(sizes), watch.finish())


def _sizes(
    streamed: StreamedModel,
    index: int,
    block: nn.Module,
    readers: Collection[str],
    states: HiddenStates,
    batches: Sequence[Batch],
) -> list[torch.Tensor]:
    """Mean size of each dimension, over the mean of all, of each input that some of these layers share: float32 `[dimensions]`."""

    def run(number: int) -> Callable[[], Any]:
        return lambda: streamed.run_block(index, states.get(number), batches[number])

    groups = find_groups(block, run(0), readers)
    if not groups:
        return []
    forwards = [(run(number), batch[1]) for number, batch in enumerate(batches)]
    found = []
    for group, statistics in zip(groups, collect(block, groups, forwards, hessian=False), strict=True):
        if not statistics.finite:
            name = streamed.block_prefix(index) + group.members[0]
            raise CompressError(f"{name}: its calibration inputs hold NaN or Inf")
        mean = statistics.abs_mean.cpu()
        found.append(mean / mean.mean().clamp_min(1e-30))
    return found


def _mean(values: Iterable[torch.Tensor]) -> torch.Tensor | None:
    held = list(values)
    return torch.stack(held).mean(0) if held else None


class _Watch:
    """Collects what norms divide by. `seen`: those that have run."""

    def __init__(self, norms: dict[str, Norm]) -> None:
        self.norms = norms
        self.seen: set[str] = set()
        self._total: dict[str, torch.Tensor] = {}
        self._tokens: dict[str, int] = {}

    @contextmanager
    def on(self, model: nn.Module, names: Collection[str], mask: torch.Tensor | None) -> Iterator[None]:
        """Watch these, over a batch whose tokens `mask` `[b, s]` tells from padding."""
        handles = [model.get_submodule(name).register_forward_pre_hook(self._hook(name, mask)) for name in names]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _hook(self, name: str, mask: torch.Tensor | None) -> Callable[..., None]:
        def hook(_module: nn.Module, args: tuple[torch.Tensor, ...]) -> None:
            x = args[0].detach().reshape(-1, args[0].shape[-1])
            if mask is not None and mask.numel() == len(x):
                x = x[mask.reshape(-1).to(x.device)]
            self.seen.add(name)
            shares = self.norms[name].shares(x).cpu()
            self._total[name] = self._total.get(name, torch.zeros(1)) + shares
            self._tokens[name] = self._tokens.get(name, 0) + len(x)

        return hook

    def finish(self) -> dict[str, torch.Tensor]:
        """Means over tokens."""
        found = {name: value / max(self._tokens[name], 1) for name, value in self._total.items()}
        for name, value in found.items():
            if not bool(torch.isfinite(value).all()):
                raise CompressError(f"{name}: its calibration inputs hold NaN or Inf")
        return found
