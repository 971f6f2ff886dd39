"""Drafts in training: what they propose, their loss on a batch, and how often the target would accept them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from compress.distill.draft.cut import cut_checkpoint
from compress.distill.draft.write import write_draft, write_tensors
from compress.distill.train.checkpoint import trained_weights
from compress.distill.train.data import Batch, TextRows
from compress.distill.train.loop import Goal, Sums, add_sums
from compress.distill.train.losses import Objective, SparseTargets, Targets
from compress.distill.train.teacher import Teacher
from compress.distill.train.teacher_cache import kept_digest
from runtime.checkpoint.checkpoint import Checkpoint

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class Student(nn.Module):
    """A draft that proposes one token after another, and what it learns.

    Attributes:
        draft: the model; weights to be trained are float32.
        objective: the loss.
        vocabulary: the target's; so wide are the logits of the whole head.
        kept: int64 `[k]`, ascending, the only tokens that a trimmed head proposes (`vocab_trim`); None: all. The distribution of a
            trimmed draft is over these, and so is the teacher's in the loss (renormalized); acceptance is that of the whole target.
        levels: tokens ahead that are trained and measured each by itself; 1 for drafts that go token by token.
        one_pass: one pass of it proposes all tokens of a draft.
    """

    phase = "draft"
    goal = Goal("acceptance", larger=True)
    forgiving = False
    levels = 1
    one_pass = False
    kept: torch.Tensor | None

    def __init__(
        self, draft: PreTrainedModel, objective: Objective | None = None, kept: torch.Tensor | None = None
    ) -> None:
        super().__init__()
        self.draft, self.objective = draft, objective or Objective()
        self.vocabulary = int(draft.config.get_text_config(decoder=True).vocab_size)
        self.register_buffer("kept", None if kept is None else kept.to(torch.int64), persistent=False)

    @property
    def width(self) -> int:
        """Tokens that it may propose."""
        return self.vocabulary if self.kept is None else len(self.kept)

    def forward(self, batch: Batch, targets: Targets | None) -> tuple[torch.Tensor, torch.Tensor]:
        """The loss over a batch, and what to divide it by: the sum of weighted losses of the trained positions, the sum of weights.

        Args:
            batch: `[b, s]`.
            targets: the teacher's logits `[b, s, vocabulary]`, sparse targets `[b, s, k]` over `kept`, or None where the objective
                has no teacher.
        """
        return self.loss(self.logits(batch.ids), batch, targets)

    def logits(self, ids: torch.Tensor) -> torch.Tensor:
        """What it would propose after each token, `[b, s, width]`."""
        return self._own(self.draft(input_ids=ids, use_cache=False).logits)

    def proposals(self, ids: torch.Tensor, length: int) -> Iterator[torch.Tensor]:
        """For each of `length` tokens ahead, j = 0, 1, ...: logits `[b, s - j, width]`; at index a those of token a + 1 + j, drafted
        when the tokens up to a were known (and those between them accepted)."""
        logits = self.logits(ids)
        for ahead in range(length):
            yield logits[:, ahead:]

    def measured(self, ids: torch.Tensor) -> Iterator[tuple[str, torch.Tensor, int]]:
        """What `measure` compares: the end of a name ("": none), logits `[b, s - first, width]`, the first position that they are of."""
        for ahead, logits in enumerate(self.proposals(ids, self.levels)):
            yield (str(ahead + 1) if self.levels > 1 else ""), logits, ahead

    def describe_means(self, means: dict[str, float]) -> str:
        """For people."""
        return f"acceptance {means['acceptance']:.3f}, same token {means['agreement']:.3f}"

    @torch.no_grad()
    def measure(self, batch: Batch, targets: torch.Tensor) -> Sums:
        """How often the target would accept what it proposes, on trained positions.

        Args:
            batch: `[b, s]`.
            targets: the target's logits `[b, s, vocabulary]`.

        Returns:
            "acceptance", the sum over tokens of min(p, q), as speculative sampling accepts at temperature 1 (arXiv 2211.17192), and
            "agreement", the share of positions whose likeliest token is the same, as greedy decoding accepts; of drafts with several
            levels or depths also "acceptance_1", ... of each.
        """
        sums: Sums = {}
        for end, logits, first in self.measured(batch.ids):
            found = overlaps(logits, targets[:, first:], batch.trained[:, first:], self.kept)
            add_sums(sums, found)
            sums |= {f"{name}_{end}": value for name, value in found.items() if end}
        return sums

    def describe(self) -> dict[str, Any]:
        """What is trained and how, as plain data; equal for runs that go on from each other."""
        return {
            "student": type(self).__name__, "objective": self.objective.describe(), "kept": kept_digest(self.kept),
            "parameters": {name: list(p.shape) for name, p in self.named_parameters() if p.requires_grad},
        }  # fmt: skip

    # ---------------------------------------------------------------- how it is stored
    @property
    def content(self) -> dict[str, Any]:
        """What draft.json says of drafts of this kind."""
        return {}

    def write(self, directory: Path, content: Mapping[str, Any], teacher: Teacher, held_out: TextRows) -> None:
        """Write the draft's directory.

        Args:
            content: of draft.json.
            teacher, held_out: for measures that the drafter reads when it runs.
        """
        write_draft(directory, self.draft, {**content, **self.content}, self.kept)

    def read_back(self, directory: Path) -> None:
        """Take on the numbers that are stored, which have fewer bits: acceptance has to be measured on them."""
        # The model, not its numbers alone: a quantized head is no longer the embeddings that it was tied to.
        self.draft = cut_checkpoint(directory, None, device=self.draft.device)

    def bytes_read(self, directory: Path, artifact: Path) -> float:
        """Bytes of weights that one pass reads of the draft stored in `directory`, and of its target."""
        return read_bytes(directory, self.width, self.vocabulary)

    def variants(self) -> dict[str, Student]:
        """Drafts that it holds, by name, the whole one last; none: it is one."""
        return {}

    # ---------------------------------------------------------------- what the kinds share
    def loss(
        self, states: torch.Tensor, batch: Batch, targets: Targets | None, first: int = 0, head: Any = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Sum of the losses of the trained positions, and their number.

        Args:
            states: logits `[b, s - first, width]` at the positions from `first` on; with a `head`, what it makes such logits of.
        """
        # The label of the last position is wrong, and it is never trained.
        labels, trained = self.labels(batch.ids.roll(-1, 1)[:, first:], batch.trained[:, first:])
        logits = states[trained] if head is None else head(states[trained])
        chosen = None if targets is None else self.restricted(targets[:, first:][trained])
        losses = self.objective(logits, chosen, labels[trained])
        return losses.sum(), trained.sum().to(losses.dtype)

    def labels(self, ids: torch.Tensor, trained: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Ids as a trimmed head counts them where the text itself is learned, and positions whose ids it has."""
        if self.kept is None or self.objective.needs_teacher:
            return ids, trained
        columns, there = columns_of(ids, self.kept)
        return columns, trained & there

    def restricted(self, targets: Targets) -> Targets:
        """The teacher's logits of the tokens that a trimmed head has."""
        return targets if self.kept is None or isinstance(targets, SparseTargets) else targets[..., self.kept]

    def _own(self, logits: torch.Tensor) -> torch.Tensor:
        return logits if self.kept is None else logits[..., self.kept]


class TensorStudent(Student):
    """A draft that is stored as some tensors in one file, in bfloat16.

    Attributes:
        file: name of the file.
    """

    file: str

    def tensors(self) -> dict[str, torch.Tensor]:
        """What is stored, parameters and others, by name."""
        raise NotImplementedError

    def write(self, directory: Path, content: Mapping[str, Any], teacher: Teacher, held_out: TextRows) -> None:
        """As `Student.write`: what was trained, which is rounded as it is stored."""
        round_trained(self)
        write_tensors(directory, self.file, self.tensors(), {**content, **self.content})

    def read_back(self, directory: Path) -> None:
        """They were rounded when they were written."""


def columns_of(ids: torch.Tensor, kept: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Columns of ids `[...]` in a head trimmed to `kept` `[k]` (None: it is whole), int64, and whether it has them, bool."""
    if kept is None:
        return ids, torch.ones_like(ids, dtype=torch.bool)
    index = torch.searchsorted(kept, ids.contiguous()).clamp_max(len(kept) - 1)
    return index, kept[index] == ids


def overlaps(
    logits: torch.Tensor, teacher: torch.Tensor, counted: torch.Tensor, kept: torch.Tensor | None = None
) -> Sums:
    """Sums of acceptance and agreement over the positions `counted` bool `[...]` (see `Student.measure`).

    Args:
        logits: the draft's, `[..., width]`.
        teacher: the target's, `[..., vocabulary]`.
        kept: ids of the draft's columns; None: the same as the target's.
    """
    log_q, log_p = torch.log_softmax(logits[counted].float(), -1), torch.log_softmax(teacher[counted].float(), -1)
    first = log_q.argmax(-1)
    if kept is not None:
        first = kept[first]
    agree = (first == log_p.argmax(-1)).sum()
    if kept is not None:
        log_p = log_p[:, kept]
    accepted = torch.minimum(log_p, log_q).exp().sum(-1).clamp_max(1.0)  # without what softmaxes are rounded by
    count = float(counted.sum())
    return {"acceptance": (float(accepted.double().sum()), count), "agreement": (float(agree), count)}


@torch.no_grad()
def round_trained(student: Student, dtype: torch.dtype = torch.bfloat16) -> None:
    """Round what was trained as it is stored."""
    for weight in trained_weights(student).values():
        weight.copy_(weight.to(dtype))


def read_bytes(directory: Path, width: int = 1, vocabulary: int = 1) -> int:
    """Bytes of weights that one token of a model reads: all but the embeddings, and of a trimmed head `width` of `vocabulary` rows."""
    checkpoint = Checkpoint(directory)
    names = checkpoint.names()
    tied = not any(name.startswith("lm_head.") for name in names)
    total = 0.0
    for name in names:
        size = checkpoint.nbytes(name)
        if "embed_tokens" in name or name.startswith(("transformer.wte", "gpt_neox.embed_in")):
            total += size * width / vocabulary if tied else 0
        else:
            total += size * width / vocabulary if name.startswith("lm_head.") else size
    return round(total)
