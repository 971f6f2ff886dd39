"""Codebook fitted by k-means (Lloyd, 1982): `vector` weights of a row become the number of the nearest of its centroids."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from runtime.formats.bitpack import pack_rows, packed_words, unpack_rows
from runtime.formats.representation import Representation, Shape, Tensors, TensorSpec


@dataclass(frozen=True)
class KMeans(Representation):
    """One codebook `[2^(bits * vector), vector]` for a whole matrix, in the model's dtype."""

    name = "kmeans"
    bits: int = 3
    vector: int = 1

    def __post_init__(self) -> None:
        if not (self.bits >= 1 and self.vector >= 1 and 2 <= self.bits * self.vector <= 8):
            raise ValueError(f"a code has 2 to 8 bits, not {self.bits} bits x {self.vector} columns")

    @property
    def width(self) -> int:
        """Bits of a code."""
        return self.bits * self.vector

    def describe(self) -> str:
        return f"kmeans {self.bits} bits" + (f" in pairs of {self.vector}" if self.vector > 1 else "")

    def fit(self, weight: torch.Tensor, dtype: torch.dtype, importance: torch.Tensor | None = None) -> Tensors:
        points = weight.reshape(-1, self.vector)
        each = torch.ones(weight.shape[1]) if importance is None else importance.float().clamp(min=1e-12)
        mass = each.to(weight).expand_as(weight).reshape(-1, self.vector).mean(1)
        order = points[:, 0].argsort(stable=True)
        middle = (torch.arange(2**self.width) + 0.5) / 2**self.width * len(points)
        centroids = points[order[middle.long()]].clone()
        for _ in range(12):
            code = torch.cdist(points, centroids).argmin(1)
            total = torch.zeros(len(centroids)).index_add_(0, code, mass)
            moved = torch.zeros_like(centroids).index_add_(0, code, points * mass[:, None])
            centroids = torch.where(total[:, None] > 0, moved / total.clamp(min=1e-30)[:, None], centroids)
        return {"codebook": centroids.to(dtype)}

    def nearest(
        self, columns: torch.Tensor, parameters: Tensors, first: int, metric: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        codebook, points = parameters["codebook"].float(), columns.T.contiguous()
        weighed = torch.eye(self.vector) if metric is None else torch.linalg.cholesky(metric)
        codes = torch.cdist(points @ weighed, codebook @ weighed).argmin(1)
        return codebook[codes].T, codes

    def dequantize(self, codes: torch.Tensor, parameters: Tensors, dtype: torch.dtype) -> torch.Tensor:
        return parameters["codebook"].to(dtype)[codes.long()].flatten(1)

    def tensors(self, shape: Shape, dtype: torch.dtype) -> dict[str, TensorSpec]:
        words = packed_words(shape[1] // self.vector, self.width)
        return {
            "weight_packed": TensorSpec((shape[0], words), torch.int32),
            "weight_codebook": TensorSpec((2**self.width, self.vector), dtype),
        }

    def encode(self, codes: torch.Tensor, parameters: Tensors) -> Tensors:
        signed = (codes - 2 ** (self.width - 1)).to(torch.int8)
        return {"weight_packed": pack_rows(signed, self.width), "weight_codebook": parameters["codebook"]}

    def decode(self, tensors: Tensors, shape: Shape) -> tuple[torch.Tensor, Tensors]:
        signed = unpack_rows(tensors["weight_packed"], self.width, shape[1] // self.vector)
        return signed.long() + 2 ** (self.width - 1), {"codebook": tensors["weight_codebook"]}
