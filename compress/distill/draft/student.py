"""A draft as it is trained and measured: what it proposes, its loss on a batch, how often its target would accept it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from compress.distill.train.data import Batch
from compress.distill.train.loop import Goal, Sums
from compress.distill.train.losses import Objective, SparseTargets, Targets
from compress.distill.train.teacher_cache import TeacherCache, kept_digest
from runtime.errors import RequestError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_ACCEPTANCE = Goal("acceptance", larger=True)


class Student(nn.Module):
    """A draft that proposes one token after another, and what it learns.

    Attributes:
        draft: the model; weights to be trained are float32.
        objective: what is made small.
        vocabulary: the target's; so wide are the logits of the whole head.
        kept: int64 `[k]`, ascending, the only tokens that a trimmed head proposes (`vocab_trim`); None: all. The distribution of a
            trimmed draft is over these, and so is the teacher's in the loss (renormalized); acceptance is that of the whole target.
        levels: tokens ahead that are trained and measured each by itself; 1 for drafts that go token by token.
        one_pass: one pass of it proposes all tokens of a draft.
    """

    phase = "draft"
    goal = _ACCEPTANCE
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
        self.register_buffer("kept", None if kept is None else check_kept(kept, self.vocabulary), persistent=False)

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
        return self._loss(self.logits(batch.ids), batch, targets)

    def logits(self, ids: torch.Tensor) -> torch.Tensor:
        """What it would propose after each token, `[b, s, width]`."""
        return self._own(self.draft(input_ids=ids, use_cache=False).logits)

    def proposals(self, ids: torch.Tensor, length: int) -> Iterator[torch.Tensor]:
        """For each of `length` tokens ahead, j = 0, 1, ...: logits `[b, s - j, width]`; at index a those of token a + 1 + j, drafted
        when the tokens up to a were known (and those between them accepted)."""
        logits = self.logits(ids)
        for ahead in range(length):
            yield logits[:, ahead:]

    def targets(self, teacher: Any, batch: Batch) -> Targets | None:
        """What is learned from a `Teacher`, a `TeacherCache`, or None."""
        if teacher is None:
            return None
        if isinstance(teacher, TeacherCache):
            return teacher.targets(batch.rows).to(batch.ids.device)
        logits: torch.Tensor = teacher.logits(batch.ids)
        return logits

    def look(self, batch: Batch, judge: Any) -> Sums:
        """`measure`, against a `Teacher`."""
        return self.measure(batch, judge.logits(batch.ids))

    def told(self, means: dict[str, float]) -> str:
        """For people."""
        return f"acceptance {means['acceptance']:.3f}, same token {means['agreement']:.3f}"

    @torch.no_grad()
    def measure(self, batch: Batch, teacher: torch.Tensor) -> Sums:
        """How often the target would accept what it proposes, on trained positions.

        Args:
            batch: `[b, s]`.
            teacher: the target's logits `[b, s, vocabulary]`.

        Returns:
            "acceptance", the sum over tokens of min(p, q), as speculative sampling accepts at temperature 1 (arXiv 2211.17192), and
            "agreement", the share of positions whose likeliest token is the same, as greedy decoding accepts; of drafts with several
            levels also "acceptance_1", ... of each.
        """
        result: dict[str, tuple[float, float]] = {}
        for ahead, logits in enumerate(self.proposals(batch.ids, self.levels)):
            found = overlaps(logits, teacher[:, ahead:], batch.trained[:, ahead:], self.kept)
            for name, (value, count) in found.items():
                before = result.get(name, (0.0, 0.0))
                result[name] = (before[0] + value, before[1] + count)
                if self.levels > 1:
                    result[f"{name}_{ahead + 1}"] = (value, count)
        return result

    def describe(self) -> dict[str, Any]:
        """What is trained and how, as plain data; equal for runs that go on from each other."""
        return {
            "student": type(self).__name__, "objective": self.objective.describe(), "kept": kept_digest(self.kept),
            "parameters": {name: list(p.shape) for name, p in self.named_parameters() if p.requires_grad},
        }  # fmt: skip

    # ---------------------------------------------------------------- what the kinds share
    def _own(self, logits: torch.Tensor) -> torch.Tensor:
        return logits if self.kept is None else logits[..., self.kept]

    def _loss(self, logits: torch.Tensor, batch: Batch, targets: Targets | None) -> tuple[torch.Tensor, torch.Tensor]:
        trained = batch.trained
        labels = batch.ids.roll(-1, 1)  # the last position, where this is wrong, is never trained
        if self.kept is not None and not self.objective.needs_teacher:
            labels, known = self._renamed(labels)
            trained = trained & known
        chosen = None if targets is None else self._restricted(targets)[trained]
        losses = self.objective(logits[trained], chosen, labels[trained])
        return losses.sum(), trained.sum().to(losses.dtype)

    def _restricted(self, targets: Targets) -> Targets:
        if self.kept is None or isinstance(targets, SparseTargets):
            return targets
        return targets[..., self.kept]

    def _renamed(self, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Ids as indices of `kept`, and whether they are among them."""
        assert self.kept is not None
        index = torch.searchsorted(self.kept, ids.contiguous()).clamp_max(len(self.kept) - 1)
        return index, self.kept[index] == ids


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


def check_kept(kept: torch.Tensor, vocabulary: int) -> torch.Tensor:
    """Kept tokens as int64; RequestError unless they are ascending ids of the vocabulary."""
    ids = kept.to(torch.int64)
    if (
        ids.dim() != 1
        or not len(ids)
        or int(ids[0]) < 0
        or int(ids[-1]) >= vocabulary
        or not bool((ids.diff() > 0).all())
    ):
        raise RequestError(f"kept tokens must be ascending ids below {vocabulary}, without repetition")
    return ids
