"""Rows of token ids that are trained on: given text, continuations by the teacher or by the draft, or a mixture."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors.torch import load_file, save_file

from compress.core.files import written_beside
from compress.model.module_hooks import evaluating
from runtime.modeling.cache_argument import cache_argument


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


Told = Callable[[int, int], Any]  # rows done, rows in all


def split_rows(ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows `[n, s]` to train on, and rows that are held out."""
    count = held_out(len(ids))
    return ids[:-count], ids[-count:]


def held_out(rows: int) -> int:
    """How many of so many rows are not trained on: an eighth, 64 at most."""
    return min(64, max(1, rows // 8))


class Source(Protocol):
    """A source of batches."""

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
    """

    def __init__(self, ids: torch.Tensor, trained: torch.Tensor | None = None, kind: str = "given") -> None:
        self.ids, self.kind, self.length = ids, kind, int(ids.shape[1])
        self.trained = torch.ones_like(ids, dtype=torch.bool) if trained is None else trained.clone()
        self.trained[:, -1] = False

    def __len__(self) -> int:
        return len(self.ids)

    def batch(self, rows: Sequence[int], seeds: Sequence[int]) -> Batch:
        """The rows of these numbers; `seeds` are only passed on."""
        index = torch.tensor(rows)
        return Batch(self.ids[index], self.trained[index], index, torch.tensor(seeds))

    def parts(self, size: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Ids and trained positions, at most `size` rows at a time."""
        return zip(self.ids.split(size), self.trained.split(size), strict=True)

    def describe(self) -> dict[str, Any]:
        """Kind, shape and SHA-256 of the rows, JSON-able."""
        return {"data": self.kind, "rows": list(self.ids.shape), "sha256": digest_of(self.ids, self.trained)}

    def save(self, file: Path) -> None:
        """Write a teacher's rows as safetensors: they take longer to make than to keep."""
        with written_beside(file) as temporary:
            save_file({"ids": self.ids.to(torch.int32), "trained": self.trained}, temporary)

    @classmethod
    def load(cls, file: Path) -> TextRows:
        """What `save` wrote."""
        tensors = load_file(file)
        return cls(tensors["ids"].long(), tensors["trained"], "teacher")


@dataclass(eq=False)
class OnPolicyRows:
    """Prompts that the draft itself continues, as it is when a batch is asked for; the teacher then says what it should have said.

    Attributes:
        draft: the model being trained.
        prompts: int64 `[n, p]`.
        tokens: written after each.
        temperature: of the draft, above 0.
        ends: ids that end a text.
        kept: the draft proposes only these ids (`vocab_trim`); None: all.
    """

    draft: Any
    prompts: torch.Tensor
    tokens: int
    temperature: float = 1.0
    ends: frozenset[int] = frozenset()
    kept: torch.Tensor | None = None

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


@dataclass(eq=False)
class MixedRows:
    """A share of on-policy rows among fixed ones (DistillSpec's mixed data).

    Attributes:
        fixed: given text or the teacher's.
        on_policy: as many prompts, whose rows are as long.
        share: of rows that are generated, in [0, 1]; which ones is decided by their seeds.
    """

    fixed: TextRows
    on_policy: OnPolicyRows
    share: float = 0.5

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


@torch.no_grad()
def continuations(
    model: Any,
    prompts: torch.Tensor,
    tokens: int,
    temperature: float,
    seeds: Sequence[int],
    ends: frozenset[int] = frozenset(),
    kept: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Continue prompts as the model would.

    Args:
        model: of transformers, on any device; a training mode (dropout) is set aside.
        prompts: int64 `[b, p]`, no padding.
        tokens: to write.
        temperature: 0: the likeliest tokens; above: drawn from the logits divided by it.
        seeds: one a row. A row's draws are its own, so that what shares its batch changes nothing but rounding.
        ends: ids after which a row is done.
        kept: int `[k]`, the only ids that are written; None: all.

    Returns:
        int64 `[b, p + tokens]` on the CPU, a row's own first end token repeated after it, and int64 `[b]`, the tokens up to and with it.
    """
    generators = [torch.Generator().manual_seed(seed) for seed in seeds]
    device, name = next(model.parameters()).device, cache_argument(model)
    with evaluating(model):
        ids, cache = prompts.to(device), None
        step, written = ids, list[torch.Tensor]()
        done = torch.zeros(len(ids), dtype=torch.bool, device=device)
        ending = torch.tensor(sorted(ends), dtype=torch.int64, device=device)
        lengths = torch.full((len(ids),), tokens, device=device)
        for number in range(tokens):
            output = model(input_ids=step, use_cache=True, **{name: cache})
            cache = output[name]
            chosen = _choose(output.logits[:, -1].float(), temperature, generators, kept)
            if number:
                chosen = torch.where(done, written[-1], chosen)
            ended = torch.isin(chosen, ending) & ~done
            lengths[ended] = number + 1
            done |= ended
            written.append(chosen)
            step = chosen[:, None]
            if bool(done.all()):
                written += [chosen] * (tokens - number - 1)
                break
    return torch.cat([ids, torch.stack(written, 1)], 1).cpu(), lengths.cpu()


def _choose(
    logits: torch.Tensor, temperature: float, generators: list[torch.Generator], kept: torch.Tensor | None
) -> torch.Tensor:
    names = None if kept is None else kept.to(logits.device, torch.int64)
    if names is not None:
        logits = logits[:, names]
    if temperature == 0:
        picked = logits.argmax(-1)
    else:
        # In float64: the sum over a large vocabulary must not swallow its unlikely end.
        sums = torch.softmax(logits.double() / temperature, -1).cumsum(-1)
        drawn = torch.stack([torch.rand((), generator=g, dtype=torch.float64) for g in generators]).to(logits.device)
        picked = torch.searchsorted(sums, (drawn * sums[:, -1])[:, None], right=True)[:, 0].clamp_max(
            logits.shape[-1] - 1
        )
    return picked if names is None else names[picked]
