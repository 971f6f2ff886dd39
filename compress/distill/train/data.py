"""Training tokens of a draft: given text, continuations by the teacher or by the draft, or a mixture."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch

from compress.core.files import written_beside
from compress.distill.train.sampling import continuations
from runtime.errors import RequestError

# Rows of token ids that are trained on together, and what all that make rows need: seeds, digests, masks.


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
        """A copy with all tensors on `device`."""
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


Told = Callable[[int, int], Any]  # rows done, rows in all


class Source(Protocol):
    """A source of batches.

    Attributes:
        length: tokens of a row.
        largest: the largest id that is given (what a draft writes is its own).
    """

    length: int
    largest: int

    def __len__(self) -> int:
        """Rows of an epoch."""

    def batch(self, rows: Sequence[int], seeds: Sequence[int]) -> Batch:
        """These rows; each depends on nothing but its index, its seed and, on-policy, the draft as it is now."""

    def describe(self) -> dict[str, Any]:
        """Its description, JSON-able; equal for equal rows."""


class TextRows:
    """Fixed rows: the text that is given, or what a teacher has written (`teacher_rows`).

    Args:
        ids: int64 `[n, s]`, s at least 2.
        trained: bool `[n, s]`; None: all positions. The last one, after which nothing follows, is never trained.
        kind: for `describe`.

    Raises:
        RequestError: of another shape or dtype.
    """

    def __init__(self, ids: torch.Tensor, trained: torch.Tensor | None = None, kind: str = "given") -> None:
        self.ids = check_rows(ids, "training rows", 2)
        self.trained = torch.ones_like(ids, dtype=torch.bool) if trained is None else trained.clone()
        if self.trained.shape != ids.shape or self.trained.dtype != torch.bool:
            raise RequestError(f"the mask of training rows must be bool {list(ids.shape)}")
        self.trained[:, -1] = False
        self.kind, self.length, self.largest = kind, int(ids.shape[1]), int(ids.max())

    def __len__(self) -> int:
        return len(self.ids)

    def batch(self, rows: Sequence[int], seeds: Sequence[int]) -> Batch:
        """The rows of these numbers; `seeds` are only passed on."""
        index = torch.tensor(rows)
        return Batch(self.ids[index], self.trained[index], index, torch.tensor(seeds))

    def describe(self) -> dict[str, Any]:
        """Kind, shape and SHA-256 of the rows, JSON-able."""
        return {"data": self.kind, "rows": list(self.ids.shape), "sha256": digest_of(self.ids, self.trained)}

    def save(self, file: Path) -> None:
        """Write them as safetensors: generated rows take longer to make than to keep."""
        from safetensors.torch import save_file

        with written_beside(file) as temporary:
            tensors = {"ids": self.ids.to(torch.int32), "trained": self.trained}
            save_file(tensors, temporary, metadata={"kind": self.kind})

    @classmethod
    def load(cls, file: Path) -> TextRows:
        """What `save` wrote; ArtifactError when the file is damaged."""
        from runtime.checkpoint.headers import read_header

        header = read_header(file)
        if set(header.tensors) != {"ids", "trained"}:
            raise RequestError(f"{file} holds no training rows")
        from safetensors.torch import load_file

        tensors = load_file(file)
        return cls(tensors["ids"].long(), tensors["trained"].bool(), header.metadata.get("kind", "given"))


class OnPolicyRows:
    """Prompts that the draft itself continues, as it is when a batch is asked for; the teacher then says what it should have said.

    Args:
        draft: the model being trained.
        prompts: int64 `[n, p]`.
        tokens: written after each.
        temperature: of the draft, above 0.
        ends: ids that end a text.
        kept: the draft proposes only these ids (`vocab_trim`); None: all.
    """

    def __init__(
        self,
        draft: Any,
        prompts: torch.Tensor,
        tokens: int,
        temperature: float = 1.0,
        ends: frozenset[int] = frozenset(),
        kept: torch.Tensor | None = None,
    ) -> None:
        self.prompts = check_rows(prompts, "prompts", 1)
        if tokens < 1:
            raise RequestError(f"tokens to write must be at least 1, not {tokens}")
        self.draft, self.tokens, self.temperature, self.ends, self.kept = draft, tokens, temperature, ends, kept
        self.length, self.largest = int(prompts.shape[1]) + tokens, int(prompts.max())

    def __len__(self) -> int:
        return len(self.prompts)

    def batch(self, rows: Sequence[int], seeds: Sequence[int]) -> Batch:
        """Prompts of these numbers, each continued by the draft with its own seed; only what was generated is trained on."""
        part = self.prompts[torch.tensor(rows)]
        ids, lengths = continuations(self.draft, part, self.tokens, self.temperature, seeds, self.ends, self.kept)
        trained = written_mask(part.shape[1], lengths, self.tokens)
        return Batch(ids, trained, torch.full((len(ids),), -1), torch.tensor(seeds))

    def describe(self) -> dict[str, Any]:
        """Settings of the generation, and shape and SHA-256 of the prompts, JSON-able."""
        return {
            "data": "on_policy", "tokens": self.tokens, "temperature": self.temperature, "prompts": list(self.prompts.shape),
            "sha256": digest_of(self.prompts),
        }  # fmt: skip


class MixedRows:
    """A share of on-policy rows among fixed ones (DistillSpec's mixed data).

    Args:
        fixed: given text or the teacher's.
        on_policy: as many prompts, whose rows are as long.
        share: of rows that are generated, in [0, 1]; which ones is decided by their seeds.
    """

    def __init__(self, fixed: TextRows, on_policy: OnPolicyRows, share: float = 0.5) -> None:
        if (len(fixed), fixed.length) != (len(on_policy), on_policy.length):
            raise RequestError(
                f"mixed rows: {len(fixed)} fixed ones of {fixed.length} tokens, {len(on_policy)} generated ones of {on_policy.length}; "
                "both must be equal"
            )
        if not 0 <= share <= 1:
            raise RequestError(f"the share of on-policy rows must be 0 to 1, not {share}")
        self.fixed, self.on_policy, self.share = fixed, on_policy, share
        self.length, self.largest = fixed.length, max(fixed.largest, on_policy.largest)

    def __len__(self) -> int:
        return len(self.fixed)

    def batch(self, rows: Sequence[int], seeds: Sequence[int]) -> Batch:
        """Fixed rows of these numbers; those whose seed says so are generated by the draft instead."""
        result = self.fixed.batch(rows, seeds)
        slots = [slot for slot, seed in enumerate(seeds) if mix(seed, 1) < self.share * 2**63]
        if not slots:
            return result
        made = self.on_policy.batch([rows[slot] for slot in slots], [seeds[slot] for slot in slots])
        at = torch.tensor(slots)
        return Batch(
            result.ids.index_copy(0, at, made.ids),
            result.trained.index_copy(0, at, made.trained),
            result.rows.index_copy(0, at, made.rows),
            result.seeds,
        )

    def describe(self) -> dict[str, Any]:
        """The share of on-policy rows and the descriptions of both sources, JSON-able."""
        return {"data": "mixed", "share": self.share, "fixed": self.fixed.describe(), "made": self.on_policy.describe()}
