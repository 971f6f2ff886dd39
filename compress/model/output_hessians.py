"""Output Hessians: how sensitive the loss of a model is to errors in the outputs of each linear layer.

That of a layer is `E[g g^T]`, `[out, out]`, over the tokens of the calibration text, where `g` is the gradient by its output of what the
original model loses on labels that are drawn from its own distribution. With the second moments `G` of its inputs, an error `E` of the
weight raises the KL divergence to the original by about `tr(H E G E^T) / 2` (the Kronecker-factored Fisher matrix: Martens and Grosse,
K-FAC, 2015, arXiv 1503.05671; for rounding: Tseng et al., YAQA, 2025, arXiv 2505.22988).

One pass over the blocks keeps what enters each of them; one pass back, from the head, has one block in memory at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from compress.core.processes import Team
from compress.core.statistics import StatisticsCollector
from compress.core.tensors import finite
from compress.model.hidden_states import HiddenStates
from compress.model.module_hooks import hooks
from compress.model.streamed import Batch, StreamedModel
from runtime.errors import CompressError
from runtime.formats.bitpack import row_slices
from runtime.modeling.linear_modules import get_matrix

_SUMMED = 1 << 20  # probabilities that are added up at once


@dataclass(frozen=True)
class OutputHessians:
    """Those of a model's layers, in the files of a directory."""

    directory: Path

    def path(self, index: int) -> Path:
        """File of a block."""
        return self.directory / f"block-{index:05d}.safetensors"

    def get(self, index: int, name: str) -> torch.Tensor | None:
        """Of a layer of a block, by its name in it: float32 `[out, out]`; None: what it gives does not reach the loss."""
        if not self.path(index).is_file():
            return None
        with safe_open(self.path(index), framework="pt") as file:
            return file.get_tensor(name) if name in file.keys() else None  # noqa: SIM118 - a handle is no mapping


@dataclass
class BackwardPass:
    """The pass back over the blocks of the original model, in one of the processes that share it.

    Attributes:
        numbers: of the batches that this process reads.
        states: room for `states_per_token` tensors of each batch.
        place: directory of the file that holds second moments of so many outputs; None: they are in memory.
    """

    streamed: StreamedModel
    batches: Sequence[Batch]
    numbers: Collection[int]
    states: HiddenStates
    team: Team
    place: Callable[[int], Path | None]

    def _at(self, index: int, number: int) -> int:
        return index * len(self.batches) + number

    def run(self, wanted: Mapping[int, Sequence[str]], found: OutputHessians) -> Iterator[int]:
        """Write the files of the blocks that have layers `wanted` (names inside the block); yields each block that is done."""
        self._forward()
        self._head()
        for index in reversed(range(len(self.streamed.blocks))):
            hessians = self._block(index, wanted.get(index, ()))
            if hessians and self.team.is_main:
                save_file(hessians, found.path(index))
            yield index
        self.states.drop()

    def _forward(self) -> None:
        streamed, states = self.streamed, self.states
        with streamed.outside(head=False):
            streamed.prelude(list(self.batches), states, self.numbers)
        for index in range(len(streamed.blocks)):
            with streamed.loaded_block(index), torch.inference_mode():
                for number in self.numbers:
                    state = states.get(self._at(index, number))
                    states.put(self._at(index + 1, number), streamed.advance(index, state, self.batches[number]))

    def _head(self) -> None:
        """Gradients by what the last block gave take its place."""
        device = self.streamed.device
        with self.streamed.outside():
            for number in self.numbers:
                place, mask = self._at(len(self.streamed.blocks), number), self.batches[number][1]
                generator = torch.Generator(device).manual_seed(number)
                rows = []
                for row, state in enumerate(self.states.get(place)):
                    leaf = state[None].to(device).clone().requires_grad_()
                    with torch.enable_grad():
                        logits = self.streamed.tail(leaf)[0].float()
                        logits = logits if mask is None else logits[mask[row].to(device)]
                        if not finite(logits):
                            raise CompressError(
                                "objective output: the original model's logits are NaN or Inf on the calibration text; give propagated"
                            )
                    by_logits = logits.detach().softmax(
                        -1
                    )  # and less one at the label: the gradient of the cross entropy
                    labels = sample_labels(by_logits, generator)
                    by_logits[torch.arange(len(labels), device=device), labels] -= 1
                    rows += torch.autograd.grad(logits, leaf, by_logits)
                self.states.put(place, torch.cat(rows))

    def _block(self, index: int, names: Sequence[str]) -> dict[str, torch.Tensor]:
        """Output Hessians of layers of a block, which the gradients by its output go back through; of those that they reach."""
        streamed, states, device = self.streamed, self.states, self.streamed.device
        outputs: list[tuple[str, torch.Tensor]] = []

        def keep(name: str, _module: Any, _args: Any, output: torch.Tensor) -> None:
            if output.requires_grad:
                outputs.append((name, output))

        with streamed.loaded_block(index) as block:
            layers = {name: block.get_submodule(name) for name in names}
            sizes = {name: get_matrix(layer).shape[0] for name, layer in layers.items()}
            collectors = {n: StatisticsCollector(size, True, device, self.place(size)) for n, size in sizes.items()}
            with hooks({layer: partial(keep, name) for name, layer in layers.items()}):
                for number in self.numbers:
                    outputs.clear()
                    batch = self.batches[number]
                    state = states.get(self._at(index, number)).to(device).clone().requires_grad_()
                    with torch.enable_grad():
                        output = streamed.run_block(index, state, batch)
                    after = states.get(self._at(index + 1, number)).to(output)
                    inputs = [state, *(each for _, each in outputs)]
                    before, *own = torch.autograd.grad(output, inputs, after, allow_unused=True)
                    for (name, _), gradient in zip(outputs, own, strict=True):
                        if gradient is not None:
                            collectors[name].add(gradient, batch[1])
                    states.put(self._at(index, number), before)
        if self.team.size > 1:
            for collector in collectors.values():
                self.team.add_up(collector)
        found: dict[str, torch.Tensor] = {}
        for name, collector in collectors.items():
            statistics = collector.finish()
            if not statistics.finite:
                name = streamed.block_prefix(index) + name
                raise CompressError(f"objective output: gradients of {name} are NaN or Inf; give objective: propagated")
            if statistics.tokens and statistics.hessian is not None:
                found[name] = statistics.hessian
        return found


def states_per_token(blocks: int) -> int:
    """Hidden states of a token that the pass back needs: what enters each of so many blocks, and what the last one gives."""
    return blocks + 1


def sample_labels(probabilities: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """A label for each token, int64 `[tokens]`, drawn from `[tokens, vocab]`: one random number a token, not one a word."""
    (tokens, vocabulary), device = probabilities.shape, probabilities.device
    draws = torch.rand(tokens, 1, generator=generator, dtype=torch.float64, device=device)
    labels = torch.empty(tokens, 1, dtype=torch.int64, device=device)
    for start, stop in row_slices(tokens, vocabulary, _SUMMED):
        sums = probabilities[start:stop].cumsum(-1, dtype=torch.float64)
        labels[start:stop] = torch.searchsorted(sums, draws[start:stop] * sums[:, -1:], right=True)
    return labels.clamp_(max=vocabulary - 1)[:, 0]
