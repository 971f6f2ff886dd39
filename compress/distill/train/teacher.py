"""Teacher of a draft: the loaded artifact, which gives logits and generates sequences."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch

from compress.distill.train.data import Batch, TextRows, Told, mix, written_mask
from runtime.api.model import Model
from runtime.checkpoint.artifact import Artifact
from runtime.errors import CompressError, RequestError

Logits = Callable[[torch.Tensor], torch.Tensor]
#: prompts int64 `[b, p]`, tokens, temperature, seeds -> prompts and what is written after them, int64 `[b, p + tokens]`, padded, and how
#: many tokens of it count, `[b]`
Continue = Callable[[torch.Tensor, int, float, Sequence[int]], tuple[torch.Tensor, torch.Tensor]]


@dataclass(eq=False)
class Teacher:
    """The model that is imitated.

    Attributes:
        forward: token ids int64 `[b, s]` to logits `[b, s, vocabulary]` of what follows each.
        vocabulary: width of its logits.
        fingerprint: of its weights; the cache of its logits records it.
        ends: ids that end its sequences.
        device: where it computes.
        continuations: continues prompts.
        source: the loaded model itself.
    """

    forward: Logits
    vocabulary: int
    fingerprint: str
    ends: frozenset[int]
    device: torch.device
    continuations: Continue
    source: Any

    @classmethod
    def of(cls, model: Model) -> Teacher:
        """A teacher out of what `runtime.load` returned."""
        artifact, engine, write = cast(Artifact, model.artifact), model.engine, partial(_continued, model)
        fingerprint = artifact.checkpoint.fingerprint()
        return cls(model.logits, engine.vocab_size, fingerprint, model.eos_token_ids, engine.device, write, model)

    @property
    def facts(self) -> dict[str, Any]:
        """What tells it from other teachers, JSON-able."""
        return {"fingerprint": self.fingerprint}

    def targets(self, batch: Batch) -> torch.Tensor:
        """Logits `[b, s, vocabulary]` of a batch."""
        return self.logits(batch.ids)

    @torch.no_grad()
    def logits(self, ids: torch.Tensor) -> torch.Tensor:
        """Float32 `[b, s, vocabulary]` on the device of `ids` `[b, s]`; CompressError when they are NaN."""
        logits = self.forward(ids)
        if logits.shape != (*ids.shape, self.vocabulary):
            raise RequestError(
                f"the teacher's logits are {list(logits.shape)} for ids {list(ids.shape)}; expected a vocabulary of {self.vocabulary}"
            )
        if bool(torch.isnan(logits).any()):
            raise CompressError("the teacher gives logits that are NaN")
        # What was computed in inference mode cannot take part in a loss; a copy can.
        return logits.to(ids.device, torch.float32, copy=logits.is_inference())


def _continued(
    model: Model, prompts: torch.Tensor, tokens: int, temperature: float, seeds: Sequence[int]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Prompts continued by a loaded model, and how many of the tokens count."""
    new = model.generate(
        prompts.tolist(), max_new_tokens=tokens, temperature=temperature, seed=list(seeds), ignore_eos=True
    )
    written = torch.tensor(new, dtype=torch.int64)
    # Cut here, where the end token is still there: whether a draft foresees the end is part of its acceptance.
    ends = torch.isin(written, torch.tensor(sorted(model.eos_token_ids), dtype=torch.int64))
    first = torch.where(ends.any(1), ends.int().argmax(1) + 1, tokens)
    after = torch.arange(tokens) >= first[:, None]
    last = written.gather(1, (first - 1)[:, None])
    return torch.cat([prompts.cpu(), torch.where(after, last, written)], 1), first


def teacher_rows(
    teacher: Teacher,
    prompts: torch.Tensor,
    tokens: int,
    *,
    temperature: float = 1.0,
    seed: int = 0,
    batch: int = 16,
    told: Told | None = None,
) -> TextRows:
    """Rows that the teacher continues (DistillSpec, arXiv 2310.08461): what it would write is what a draft has to guess.

    Args:
        prompts: int64 `[n, p]`.
        tokens: at most so many are written after each; a text that ends sooner is padded, and counts up to its end token.
        temperature: 0: the likeliest tokens.
        seed: a row's text depends on it and on the row's index only.
        batch: rows at once.
        told: is called with rows done and rows in all.

    Returns:
        int64 `[n, p + tokens]`, of which what the teacher wrote is trained on.
    """
    ids, trained = [], []
    for start in range(0, len(prompts), batch):
        part = prompts[start : start + batch]
        seeds = [mix(seed, index) for index in range(start, start + len(part))]
        written, lengths = teacher.continuations(part, tokens, temperature, seeds)
        ids.append(written)
        trained.append(written_mask(part.shape[1], lengths, tokens))
        if told is not None:
            told(start + len(part), len(prompts))
    return TextRows(torch.cat(ids), torch.cat(trained), "teacher")
