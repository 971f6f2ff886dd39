"""SpinQuant: a rotation of the hidden state that is learned, so that inputs of few bits lose least (Liu et al., 2024, arXiv 2405.16406).

The paper descends on the loss of the whole model, whose inputs are rounded. Here it is the error of the outputs of the layers that read
the hidden state, all of them at once (R1), and of each layer that reads the values of heads (R2), which needs no backward pass through the
model: it is read block by block, as everywhere.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from pydantic import Field
from torch import nn
from torch.nn.utils import parametrizations

from compress.core.learning import descend, straight_through
from compress.core.orthogonal import keep_mean, orthogonal_matrix, random_hadamard_matrix, why_not
from compress.rotate.method import RotateConfig, RotateMethod, Site
from runtime.formats.activation_scheme import ActivationScheme
from runtime.kernels.activations import fake_quantize

#: Of learning, over the root of the size: 0.01 for 256 dimensions.
RATE = 0.16
#: Of a step: sites, and tokens of each.
SITES, TOKENS = 8, 128


class SpinQuantConfig(RotateConfig):
    """Rotate the hidden state, and the values of each block, by matrices that are learned from calibration text, from random ones on."""

    method: Literal["spinquant"] = Field("spinquant", description="Name of the method.")
    input_bits: int = Field(4, ge=2, le=8, description="Bits of the inputs that the rotation is learned for.")
    steps: int = Field(200, ge=8, le=10_000, description="Steps of gradient descent.")


def matrix(size: int, generator: torch.Generator) -> torch.Tensor:
    """A random Hadamard matrix, or an orthogonal one where its size has none."""
    make = orthogonal_matrix if why_not(size) else random_hadamard_matrix
    return make(size, generator)


def learn(start: torch.Tensor, sites: Sequence[Site], config: SpinQuantConfig) -> torch.Tensor:
    """See `RotateMethod.learn`; `start` where no step helps on the quarter of the tokens that is held out."""
    generator = torch.Generator().manual_seed(config.seed)
    scheme = ActivationScheme(bits=config.input_bits)
    device = sites[0].inputs.device
    sites = [site for site in sites if len(site.inputs) > 1]
    first, ones = start.to(device, torch.float32), torch.ones(len(start), dtype=torch.float64)
    keeps_mean = torch.allclose(ones @ start, ones, atol=1e-9)
    turn = _Turn(first, keeps_mean)

    def of_a_batch() -> torch.Tensor:
        rotation, total = turn(), torch.zeros((), device=device)
        for number in torch.randperm(len(sites), generator=generator)[:SITES].tolist():
            site = sites[number]
            drawn = torch.randint(len(site.inputs) * 3 // 4, (TOKENS,), generator=generator)
            shown = drawn + drawn // 3 + 1  # every fourth, from the first on, is held out
            total = total + _loss(site.inputs[shown.to(device)], site.rows, rotation, scheme)
        return total

    @torch.no_grad()
    def held_out_loss(rotation: torch.Tensor) -> float:
        return sum(float(_loss(site.inputs[::4], site.rows, rotation, scheme)) for site in sites)

    if not sites:
        return start
    best, least = start, held_out_loss(first)
    for _ in descend(turn.parameters(), RATE / len(start) ** 0.5, config.steps, of_a_batch):
        now = _orthogonal(turn().detach().double()).cpu()
        now = keep_mean(now) if keeps_mean else now
        if (found := held_out_loss(now.to(device, torch.float32))) < least:
            best, least = now, found
    return best


class _Turn(nn.Module):
    """`start` times an orthogonal matrix that is learned, the identity at first; `keeps_mean`: both keep the vector of equal numbers."""

    def __init__(self, start: torch.Tensor, keeps_mean: bool) -> None:
        super().__init__()
        size, device = len(start), start.device
        self._start, self._mirror = start, torch.empty(0)
        if keeps_mean:
            # What swaps that vector and the first axis; the matrix turns the other axes.
            axis = torch.full((size,), size**-0.5, device=device) - torch.eye(size, device=device)[0]
            self._mirror = torch.eye(size, device=device) - 2 * torch.outer(axis, axis) / axis.square().sum()
            size -= 1
        layer = nn.utils.skip_init(nn.Linear, size, size, bias=False, device=device)  # type: ignore[no-untyped-call]
        with torch.no_grad():
            layer.weight.copy_(torch.eye(size))
        self.layer = parametrizations.orthogonal(layer, orthogonal_map="cayley")

    def forward(self) -> torch.Tensor:
        own = self.layer.weight
        assert isinstance(own, torch.Tensor)
        if len(self._mirror):
            own = self._mirror @ torch.block_diag(torch.ones_like(own[:1, :1]), own) @ self._mirror
        return self._start @ own


def _loss(x: torch.Tensor, rows: torch.Tensor, rotation: torch.Tensor, scheme: ActivationScheme) -> torch.Tensor:
    """Squared error of the outputs of `rows` `[n, in]` with rotated inputs `[tokens, in]` rounded, relative to them."""
    turned = _by_pieces(x, rotation)
    rounded = straight_through(turned, fake_quantize(turned.detach(), scheme, {}))
    lost = _by_pieces(rounded - turned, rotation.T)
    return (lost @ rows.T).square().sum() / (x @ rows.T).square().sum().clamp_min(1e-30)


def cost(config: SpinQuantConfig, size: int) -> float:
    """See `RotateMethod.cost`: the systems of equations of a step run at a fifth of the speed of products."""
    return config.steps * (80.0 * size**3 + 24.0 * SITES * TOKENS * size**2)


def _by_pieces(x: torch.Tensor, rotation: torch.Tensor) -> torch.Tensor:
    """Rows `[n, in]`, each as many times as long as the matrix as a layer has heads, rotated piece by piece."""
    return (x.unflatten(-1, (-1, len(rotation))) @ rotation).flatten(-2)


def _orthogonal(matrix: torch.Tensor) -> torch.Tensor:
    """The orthogonal matrix next to one that is so up to rounding: a step of Newton's iteration."""
    return matrix @ (3 * torch.eye(len(matrix), dtype=matrix.dtype, device=matrix.device) - matrix.T @ matrix) / 2


METHOD = RotateMethod(
    SpinQuantConfig,
    matrix,
    summary="rotates the hidden state and values by matrices learned for inputs of few bits",
    paper="Liu et al., SpinQuant, 2024, arXiv 2405.16406",
    learn=learn,
    cost=cost,
    needs=frozenset({"samples"}),
)
