"""Random Hadamard matrices at run time: over whole rows (Ashkboos et al., QuaRot, 2024), or each group of columns (MR-GPTQ, 2025)."""

from __future__ import annotations

import torch

from compress.core.orthogonal import orthogonal_matrix, random_hadamard_matrix, why_not
from compress.quantize.transforms.method import Layers, TransformMethod
from runtime.formats.representation import Tensors


def find(layers: Layers) -> Tensors:
    """A Hadamard matrix with random signs for either side, or a random orthogonal one where its size has none; of the size alone."""
    transform = layers.scheme.transform
    assert transform is not None
    return {
        name: _matrix(spec.shape[0]) for name, spec in sorted(transform.tensors(layers.weights[0].shape[1]).items())
    }


def _matrix(size: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(size)
    make = orthogonal_matrix if why_not(size) else random_hadamard_matrix
    return make(size, generator).float()


METHOD = TransformMethod(
    "hadamard",
    summary="rotates inputs by random Hadamard matrices, which spread outliers over the row",
    paper="Ashkboos et al., QuaRot, 2024, arXiv 2404.00456",
    find=find,
)
BY_GROUP = TransformMethod(
    "hadamard_groups",
    summary="rotates every group of columns by one random Hadamard matrix",
    paper="Egiazarian et al., Bridging the Gap Between Promise and Performance for Microscaling FP4 Quantization, 2025, arXiv 2509.23202",
    find=find,
    by_group=True,
)
