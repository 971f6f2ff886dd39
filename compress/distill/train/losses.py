"""Losses of distillation: divergences between a teacher's and a student's next-token distributions at each position.

A teacher's distribution comes whole, as logits, or `SparseTargets`: its likeliest ids with their probabilities, and the mass of all
others. Against sparse targets a divergence is one between distributions of k + 1 outcomes, the k ids and "any other": the student's
other outcome is the sum of its probabilities of all other ids. Nothing is renormalized and no mass is thrown away, so the student still
learns how much to give to the rest, only not how to share it out. By the data processing inequality the value is never above that of
the whole distributions, and equal to it where k is the whole vocabulary.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any, Literal

import torch

from runtime.errors import RequestError

Divergence = Literal["forward_kl", "reverse_kl", "js", "tvd", "cross_entropy"]

#: A token that the teacher rules out costs a student that proposes it as much as one of probability e^-100.
LOG_FLOOR = -100.0


@dataclass(frozen=True)
class SparseTargets:
    """The likeliest ids of a teacher's distributions.

    Attributes:
        ids: int64 `[..., k]`, distinct at each position.
        log_probs: float32 `[..., k]`, natural logarithms.
        rest: float32 `[...]`, the probability of all other ids together.
    """

    ids: torch.Tensor
    log_probs: torch.Tensor
    rest: torch.Tensor

    @classmethod
    def of(cls, logits: torch.Tensor, k: int, temperature: float = 1.0) -> SparseTargets:
        """The `k` likeliest of logits `[..., vocab]`, which are divided by the temperature."""
        log_probs = torch.log_softmax(_wide(logits) / temperature, -1)
        top = log_probs.topk(k, -1)
        # Summed over the others, not taken from 1: next to a mass of nearly 1 the difference would be rounding.
        rest = log_probs.exp().scatter(-1, top.indices, 0.0).sum(-1)
        return cls(top.indices, top.values, rest)

    def __getitem__(self, index: Any) -> SparseTargets:
        """Some of the positions."""
        return SparseTargets(self.ids[index], self.log_probs[index], self.rest[index])


Targets = torch.Tensor | SparseTargets


@dataclass(frozen=True)
class Objective:
    """The training objective, in nats (`tvd`: a probability).

    Attributes:
        divergence: between teacher p and student q. "forward_kl": KL(p || q), which covers all that the teacher may say. "reverse_kl":
            KL(q || p), which seeks what it says most. "js": the generalized Jensen-Shannon divergence of GKD (arXiv 2306.13649),
            beta KL(p || m) + (1 - beta) KL(q || m) with m = beta p + (1 - beta) q. "tvd": half the sum of |p - q|, one minus the
            probability that speculative sampling accepts a token (DistillSpec, arXiv 2310.08461). "cross_entropy": -log q of the
            token that follows in the text; no teacher.
        temperature: both logits are divided by it, above 0. Losses are not scaled by its square.
        beta: of "js", above 0 and below 1; towards 0 js / beta becomes the forward KL, towards 1 js / (1 - beta) the reverse one.

    Raises:
        RequestError: a cross-entropy at another temperature than 1.
    """

    divergence: Divergence = "forward_kl"
    temperature: float = 1.0
    beta: float = 0.5

    def __post_init__(self) -> None:
        if self.divergence == "cross_entropy" and self.temperature != 1:
            text = f"cross_entropy is that of the model as it is: its temperature is 1, not {self.temperature:g}"
            raise RequestError(text)

    @property
    def needs_teacher(self) -> bool:
        """Whether the loss compares with a teacher's distribution; cross-entropy does not."""
        return self.divergence != "cross_entropy"

    def __call__(
        self, student: torch.Tensor, targets: Targets | None = None, labels: torch.Tensor | None = None
    ) -> torch.Tensor:
        """The loss of each position, float32 `[...]` (float64 where the student's logits are).

        Args:
            student: logits `[..., vocab]`.
            targets: the teacher's logits `[..., vocab]` or its `SparseTargets` at this temperature; "cross_entropy" needs none.
            labels: int64 `[...]`, the token that follows; only "cross_entropy" needs it.

        Raises:
            RequestError: targets of another vocabulary.
        """
        if not self.needs_teacher:
            assert labels is not None
            return -torch.log_softmax(_wide(student), -1).gather(-1, labels[..., None])[..., 0]
        assert targets is not None
        log_p, log_q = self._pair(student, targets)
        return _FUNCTIONS[self.divergence](log_p, log_q, self.beta)

    def describe(self) -> dict[str, Any]:
        """All fields by name, JSON-able."""
        return asdict(self)

    def _pair(self, student: torch.Tensor, targets: Targets) -> tuple[torch.Tensor, torch.Tensor]:
        """Log-probabilities of teacher and student over the same outcomes, `[..., vocab or k + 1]`."""
        log_q = torch.log_softmax(_wide(student) / self.temperature, -1)
        if isinstance(targets, torch.Tensor):
            if targets.shape != student.shape:
                raise RequestError(
                    f"the teacher's logits are {list(targets.shape)} and the student's {list(student.shape)}; both need one vocabulary"
                )
            return torch.log_softmax(targets.detach().to(log_q.dtype) / self.temperature, -1), log_q
        log_p = targets.log_probs.detach().to(log_q.dtype)
        chosen = log_q.gather(-1, targets.ids)
        if targets.ids.shape[-1] == student.shape[-1]:
            return log_p, chosen
        others = log_q.scatter(-1, targets.ids, -torch.inf).logsumexp(-1, keepdim=True)
        rest = targets.rest.detach().to(log_q.dtype)[..., None].log()
        return torch.cat([log_p, rest], -1), torch.cat([chosen, others], -1)


def _wide(logits: torch.Tensor) -> torch.Tensor:
    return logits if logits.dtype == torch.float64 else logits.float()


def _expected(log_p: torch.Tensor, difference: torch.Tensor) -> torch.Tensor:
    """Sum of p * difference, where nothing of probability 0 counts."""
    p = log_p.exp()
    return (p * difference.masked_fill(p == 0, 0.0)).sum(-1)


def _forward_kl(log_p: torch.Tensor, log_q: torch.Tensor, beta: float) -> torch.Tensor:
    return _expected(log_p, log_p - log_q)


def _reverse_kl(log_p: torch.Tensor, log_q: torch.Tensor, beta: float) -> torch.Tensor:
    return _expected(log_q, log_q - log_p.clamp_min(LOG_FLOOR))


def _js(log_p: torch.Tensor, log_q: torch.Tensor, beta: float) -> torch.Tensor:
    mixture = torch.logaddexp(log_p + math.log(beta), log_q + math.log1p(-beta))
    return beta * _expected(log_p, log_p - mixture) + (1 - beta) * _expected(log_q, log_q - mixture)


def _tvd(log_p: torch.Tensor, log_q: torch.Tensor, beta: float) -> torch.Tensor:
    return 0.5 * (log_p.exp() - log_q.exp()).abs().sum(-1)


_FUNCTIONS = {"forward_kl": _forward_kl, "reverse_kl": _reverse_kl, "js": _js, "tvd": _tvd}
