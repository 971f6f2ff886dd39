"""Rows of token ids that are trained on together, and what all that make rows need: seeds, digests, masks."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import torch

from runtime.errors import RequestError


@dataclass(frozen=True)
class Batch:
    """Rows that are trained on together.

    Attributes:
        ids: int64 `[b, s]`, padded on the right, if at all.
        trained: bool `[b, s]`: the prediction made at this position, of the token after it, counts. Never the last position.
        rows: int64 `[b]`, which row of a fixed text this is (of a cache of the teacher's too); -1: it was just generated.
        seeds: int64 `[b]`, of what is random about a row.
    """

    ids: torch.Tensor
    trained: torch.Tensor
    rows: torch.Tensor
    seeds: torch.Tensor

    def __len__(self) -> int:
        return len(self.ids)

    def split(self, size: int) -> list[Batch]:
        """At most `size` rows each."""
        parts = zip(*(value.split(size) for value in (self.ids, self.trained, self.rows, self.seeds)), strict=True)
        return [Batch(*part) for part in parts]

    def to(self, device: torch.device) -> Batch:
        return Batch(self.ids.to(device), self.trained.to(device), self.rows.to(device), self.seeds.to(device))


def mix(*numbers: int) -> int:
    """A seed out of others, in [0, 2^63), the same on every machine."""
    content = b"".join(number.to_bytes(16, "little", signed=True) for number in numbers)
    return int.from_bytes(hashlib.blake2b(content, digest_size=8).digest(), "little") >> 1


def digest_of(*tensors: torch.Tensor) -> str:
    """SHA-256 (hex) of shapes and contents."""
    digest = hashlib.sha256()
    for tensor in tensors:
        digest.update(repr(tuple(tensor.shape)).encode())
        digest.update(tensor.cpu().contiguous().numpy().tobytes())
    return digest.hexdigest()


def written_mask(prompt: int, lengths: torch.Tensor, tokens: int) -> torch.Tensor:
    """bool `[b, prompt + tokens]`: positions that predict one of the `lengths` `[b]` tokens written after a prompt."""
    place = torch.arange(prompt + tokens)
    return (place >= prompt - 1) & (place < prompt - 1 + lengths[:, None])


def check_rows(ids: torch.Tensor, what: str, least: int) -> torch.Tensor:
    """The rows on the CPU; RequestError unless they are int64 `[n, at least least]`."""
    if ids.dim() != 2 or ids.dtype != torch.int64 or not len(ids) or ids.shape[1] < least:
        raise RequestError(
            f"{what} must be int64 [n, at least {least}], not {str(ids.dtype).removeprefix('torch.')} {list(ids.shape)}"
        )
    return ids.cpu()
