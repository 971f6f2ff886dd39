"""What norms do with their weight is found by trying; layers are fitted as plain least squares would."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from transformers.models.gemma2.modeling_gemma2 import Gemma2RMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.t5.modeling_t5 import T5LayerNorm

from compress.model.couplings import Slices
from compress.prune.structure.hidden_norms import find_norms, gain
from compress.prune.structure.least_squares import nearest
from runtime.errors import RequestError

WIDTH = 24


class Half(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * x.square().mean(-1, keepdim=True).rsqrt() * (0.5 + self.weight)


class Scale(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.weight


def found(module: nn.Module) -> Any:
    with torch.device("meta"):
        model = nn.ModuleDict({"norm": module, "linear": nn.Linear(WIDTH, WIDTH), "embed": nn.Embedding(9, WIDTH)})
    slices = [Slices(f"{name}.weight", 0, 1) for name in ("norm", "linear")] + [Slices("embed.weight", 1, 1)]
    return find_norms(model.to("meta"), slices)


@pytest.mark.parametrize(
    ("module", "offset", "centred"),
    [
        (LlamaRMSNorm(WIDTH), 0.0, False), (T5LayerNorm(WIDTH), 0.0, False), (Gemma2RMSNorm(WIDTH), 1.0, False),
        (nn.LayerNorm(WIDTH), 0.0, True), (nn.LayerNorm(WIDTH, bias=False), 0.0, True), (nn.RMSNorm(WIDTH), 0.0, False),
    ],
)  # fmt: skip
def test_norms(module: nn.Module, offset: float, centred: bool) -> None:
    (norm,) = found(module).values()
    assert (norm.name, norm.offset, norm.centred) == ("norm", offset, centred)
    weight = torch.randn(WIDTH)
    torch.testing.assert_close(norm.scaled(weight, 1.5) + offset, 1.5 * (weight + offset))


def test_a_scale_is_no_norm_and_an_odd_one_is_refused() -> None:
    assert found(Scale()) == {}
    with pytest.raises(RequestError, match="weight"):
        found(Half())


@pytest.mark.parametrize("kind", [LlamaRMSNorm, nn.LayerNorm])
def test_the_gain_makes_up_for_the_smaller_root_mean_square(kind: Any) -> None:
    (norm,) = found(kind(WIDTH)).values()
    x = torch.randn(500, WIDTH) * torch.linspace(0.2, 2, WIDTH)
    x -= x.mean(1, keepdim=True)
    x[7] = 0
    kept = torch.arange(8, WIDTH)
    seen = norm.shares(x) / (len(x) - 1)
    assert float(seen.mean()) == pytest.approx(1)
    sizes = [part.square().mean(1) for part in (x[:, kept], x)]
    ratio = torch.cat([sizes[0][:7] / sizes[1][:7], sizes[0][8:] / sizes[1][8:]])
    assert gain(seen, kept) == pytest.approx(float(ratio.mean().sqrt()), rel=1e-4)
    assert gain(torch.zeros(WIDTH), kept) == 1.0


def test_the_nearest_weight_is_that_of_least_squares() -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(300, 10, generator=generator, dtype=torch.float64)
    y = (
        torch.randn(300, 4, generator=generator, dtype=torch.float64)
        + x @ torch.randn(10, 4, generator=generator).double()
    )
    best = torch.linalg.lstsq(x, y).solution.T
    moments, target = x.T @ x / len(x), y.T @ x / len(x)
    prior = torch.randn(4, 10, generator=generator)
    weight, damping = nearest(prior, moments, target, 1e-9)
    assert damping == 1e-9
    torch.testing.assert_close(weight.double(), best, rtol=1e-4, atol=1e-5)
    # The ridge holds to the weights that were there.
    held, _ = nearest(prior, moments, target, 1.0)
    assert (best - prior).norm() > (held - prior).norm() > 0.1
    never, _ = nearest(prior, torch.zeros(10, 10), torch.zeros(4, 10), 0.01)
    torch.testing.assert_close(never, prior)
