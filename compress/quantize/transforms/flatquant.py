"""FlatQuant: matrices learned so that inputs and weights lose least when both are rounded (Sun et al., 2024, arXiv 2410.09426).

The paper learns all transforms of a block against its output. Here those of one input are learned against the outputs of the layers that
read it, which needs no backward pass through the block; the solver that follows (GPTQ) makes up for more.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import suppress

import torch

from compress.core.learning import descend, straight_through
from compress.quantize.grid import nearest_values
from compress.quantize.input_grid import calibrated_tensors
from compress.quantize.transforms import hadamard
from compress.quantize.transforms.method import Layers, TransformMethod
from runtime.formats.activation_scheme import ActivationScheme
from runtime.formats.grid import GridScheme
from runtime.formats.input_transform import STORED, matrices, multiplied
from runtime.formats.representation import Tensors
from runtime.formats.scheme import Scheme
from runtime.kernels.activations import fake_quantize, outliers

STEPS = 200
RATE = 0.05
#: Rows of the weights, of all layers together, that a loss is computed with.
ROWS = 1024
#: Inputs in a step.
BATCH = 256


def find(layers: Layers) -> Tensors:
    """Matrices of the least squared error of the outputs, rounded to nearest: learned from Hadamard ones, or these where learning does not
    help on the quarter of the samples that is held out."""
    samples, start = layers.samples, hadamard.find(layers)
    assert samples is not None
    held, shown = samples[::4], samples[torch.arange(len(samples)) % 4 != 0]
    if len(shown) == 0:
        return start
    weight = _some_rows(layers.weights)
    start = {name: tensor.to(weight.device) for name, tensor in start.items()}
    loss = _loss(layers.scheme, weight)
    learned = {name: tensor.clone().requires_grad_() for name, tensor in start.items()}
    generator = torch.Generator().manual_seed(len(weight))

    def of_a_batch() -> torch.Tensor:
        return loss(shown[torch.randint(len(shown), (BATCH,), generator=generator).to(shown.device)], learned)

    best, least = start, _held_out(loss, held, start)
    with suppress(torch.linalg.LinAlgError):  # no further where a matrix cannot be inverted any more
        for _ in descend(learned.values(), RATE / weight.shape[1] ** 0.25, STEPS, of_a_batch):
            now = {name: tensor.detach().clone() for name, tensor in learned.items()}
            if (found := _held_out(loss, held, now)) < least:
                best, least = now, found
    return best


def _some_rows(weights: list[torch.Tensor]) -> torch.Tensor:
    """At most `ROWS` rows of all the weights, float32, of each as many as its share."""
    total = sum(map(len, weights))
    generator = torch.Generator().manual_seed(total)
    found = []
    for weight in weights:
        count = -(-len(weight) * min(ROWS, total) // total)
        rows = torch.randperm(len(weight), generator=generator)[:count].sort().values
        found.append(weight.detach()[rows.to(weight.device)].float())
    return torch.cat(found)


Loss = Callable[[torch.Tensor, Tensors], torch.Tensor]


@torch.no_grad()
def _held_out(loss: Loss, held: torch.Tensor, tensors: Tensors) -> float:
    """The loss on inputs that nothing was learned from, with the matrices as they are stored; infinite where one cannot be inverted."""
    try:
        found = float(loss(held, {name: tensor.to(STORED).float() for name, tensor in tensors.items()}))
    except torch.linalg.LinAlgError:
        return float("inf")
    return found if math.isfinite(found) else float("inf")


def _learned_with(scheme: Scheme) -> GridScheme:
    """The grid that weights are rounded to in every step: theirs, or in place of what takes minutes to round, one of as many bits."""
    weights = scheme.weights
    assert weights is not None
    return weights if isinstance(weights, GridScheme) else GridScheme(max(2, round(weights.bits)), strategy="channel")


def _loss(scheme: Scheme, weight: torch.Tensor) -> Loss:
    """`(inputs [n, in], matrices) -> ` squared error of the outputs, relative to them."""
    weights = _learned_with(scheme)

    def loss(x: torch.Tensor, tensors: Tensors) -> torch.Tensor:
        transformed = multiplied(weight, *matrices(tensors, lambda each: torch.linalg.inv(each).T))
        inputs = multiplied(x, *matrices(tensors))
        nearest = nearest_values(transformed.detach(), weights, torch.float32, search="minmax")
        rounded = straight_through(
            transformed, nearest, weights.width(weight.shape[1]), weights.strategy == "tensor", weights.symmetric
        )
        given = inputs if scheme.activations is None else _rounded_inputs(inputs, scheme.activations)
        wanted = x @ weight.T
        return (given @ rounded.T - wanted).square().sum() / wanted.square().sum().clamp(min=1e-30)

    return loss


def _rounded_inputs(x: torch.Tensor, activations: ActivationScheme) -> torch.Tensor:
    """Inputs rounded as at run time, with a gradient; calibrated scales are those of these inputs."""
    fixed = x.detach()
    tensors = calibrated_tensors(activations, fixed.min(), fixed.max(), torch.float32)
    rounded = fake_quantize(fixed, activations, {name: tensor.to(x.device) for name, tensor in tensors.items()})
    # What stays as it is has no part in a scale.
    kept = torch.zeros_like(fixed, dtype=torch.bool) if activations.outliers is None else outliers(fixed, activations)
    others = straight_through(
        x.masked_fill(kept, 0), rounded.masked_fill(kept, 0), activations.group_size, activations.strategy == "tensor",
        activations.symmetric,
    )  # fmt: skip
    return torch.where(kept, x, others)


METHOD = TransformMethod(
    "flatquant",
    summary="learns the matrices that let inputs and weights round best",
    paper="Sun et al., FlatQuant, 2024, arXiv 2410.09426",
    find=find,
    needs=frozenset({"samples"}),
)
