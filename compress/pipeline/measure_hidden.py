"""What dimensions of the hidden state hold, over calibration text: how large each is where layers read it, and its share of what norms
divide by. One pass, block by block."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import nn

from compress.pipeline.collect import collect, find_groups
from compress.pipeline.cutting import Cutting
from compress.pipeline.files import written_beside
from compress.pipeline.hidden import HiddenStates
from compress.pipeline.kept import intact, seal
from compress.pipeline.norms import Norm
from compress.pipeline.stream import Batch, StreamedModel
from compress.prune.structure.couplings import is_input
from runtime.errors import CompressError

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
