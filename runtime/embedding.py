"""`CompressedEmbedding`: an nn.Embedding whose table stays packed; only the rows that are looked up are dequantized."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from runtime import formats
from runtime.formats.checks import check_tensor
from runtime.module import CompressedModule
from runtime.quantization_config import ModuleEntry


class CompressedEmbedding(CompressedModule):
    """`ids` int `[...]` -> `[..., embedding_dim]` in `dtype`, from a table `[num_embeddings, embedding_dim]` in any
    format.
    """

    def __init__(self, entry: ModuleEntry, shape: tuple[int, int], dtype: torch.dtype, device: Any = "meta") -> None:
        super().__init__(entry, shape, dtype, device)
        self.num_embeddings, self.embedding_dim = self.shape

    @classmethod
    def from_tensors(
        cls, entry: ModuleEntry, shape: tuple[int, int], tensors: Mapping[str, torch.Tensor], dtype: torch.dtype
    ) -> CompressedEmbedding:
        """A table around stored tensors; ArtifactError when one is missing or does not fit."""
        module = cls(entry, shape, dtype)
        for name, spec in module._specs.items():
            check_tensor(dict(tensors), name, spec, "")
            module._buffers[name] = tensors[name]
        return module

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        if self.kernel is None:  # nobody has looked at the tensors yet
            self.check()
        wanted, position = torch.unique(ids, return_inverse=True)
        if wanted.numel() and not 0 <= int(wanted[0]) <= int(wanted[-1]) < self.num_embeddings:
            raise IndexError(f"token id outside [0, {self.num_embeddings}) in embedding")
        storage, scheme = formats.get(self.entry.format), self.entry.scheme
        rows = storage.select_rows(self._tensors(), scheme, self.shape, wanted)
        shape = (wanted.numel(), self.embedding_dim)
        picked = storage.unpack(rows, scheme, shape, self.stored_dtype, check=False).dequantize()
        return picked.to(self.dtype)[position]

    def dense(self, dtype: torch.dtype | None = None) -> nn.Embedding:
        """A plain nn.Embedding with the dequantized table."""
        table = nn.Embedding(self.num_embeddings, self.embedding_dim, device="meta")
        table.weight = nn.Parameter(self.dequantize().to(dtype or self.dtype), requires_grad=False)
        return table

    def extra_repr(self) -> str:
        return f"{self.num_embeddings}, {self.embedding_dim}, format={self.entry.format}"
