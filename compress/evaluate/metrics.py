"""Quality of next-token predictions, accumulated over chunks of logits."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from runtime.errors import CompressError

CHUNK_VALUES = 8 * 2**20
"""Logits per chunk; their float32 log-probabilities take 32 MiB each for model and reference, whatever the vocabulary."""

LOGIT_BYTES = 512 * 2**20
"""A forward pass takes fewer rows than asked for when its float32 logits would be larger than this."""


def rows_at_once(windows: torch.Tensor, vocabulary: int, batch_size: int) -> int:
    """Rows of `windows` `[n, s]` that one forward pass takes: `batch_size`, or as many as have logits of at most `LOGIT_BYTES`."""
    return max(1, min(batch_size, LOGIT_BYTES // (int(windows.shape[1]) * vocabulary * 4)))


class TokenMetrics:
    """Perplexity, and agreement with a reference model, over all tokens that were added.

    Each chunk is computed in float32; sums over tokens are float64.
    """

    def __init__(self) -> None:
        self.tokens = 0
        self.compared = 0
        self._nll = 0.0
        self._kl = 0.0
        self._agree = 0

    def add(self, logits: torch.Tensor, targets: torch.Tensor, reference_logits: torch.Tensor | None = None) -> None:
        """Score some positions.

        Args:
            logits: `[n, vocab]`, any float dtype: what the model predicts at each position.
            targets: `[n]` integers: the token that came next.
            reference_logits: `[n, vocab]` of the model to compare with, or None. Should one model have padded its vocabulary,
                only the ids that both know are compared.

        Raises:
            CompressError: logits that are NaN or +inf; a mean over them would say nothing. (-inf rules a token out.)
        """
        count = int(targets.shape[0])
        rows = max(1, CHUNK_VALUES // max(1, int(logits.shape[-1])))
        for start in range(0, count, rows):
            part = slice(start, start + rows)
            reference = None if reference_logits is None else reference_logits[part]
            self._add(logits[part], targets[part].to(logits.device), reference)
        self.tokens += count

    def _add(self, logits: torch.Tensor, targets: torch.Tensor, reference: torch.Tensor | None) -> None:
        log_probabilities = _log_softmax(logits, "the model")
        picked = log_probabilities.gather(-1, targets.long()[:, None])
        self._nll -= float(picked.double().sum())
        if reference is None:
            return
        reference = reference.to(logits.device)
        shared = min(logits.shape[-1], reference.shape[-1])
        if logits.shape[-1] != shared:
            log_probabilities = _log_softmax(logits[:, :shared], "the model")
        base = _log_softmax(reference[:, :shared], "the reference")
        # A token the reference rules out (-inf) adds nothing, whatever the model thinks of it: 0 log 0 = 0.
        terms = (base.exp() * (base - log_probabilities)).masked_fill(base == -math.inf, 0.0)
        # Sum over the vocabulary in float32, over tokens in float64. Rounding can make the KL of equal rows -1e-8: clamp.
        divergence = terms.sum(-1).clamp_min_(0.0)
        self._kl += float(divergence.double().sum())
        self._agree += int((base.argmax(-1) == log_probabilities.argmax(-1)).sum())
        self.compared += int(targets.shape[0])

    def result(self) -> dict[str, Any]:
        """`perplexity`, `nll` (mean, nats a token), `tokens`; with a reference also `kl` and `top1_agreement`.

        `kl` is the mean of KL(reference || model) over positions, in nats; `top1_agreement` the share of positions where
        both find the same token most likely.

        Raises:
            CompressError: nothing was added.
        """
        if not self.tokens:
            raise CompressError("no tokens were scored")
        nll = self._nll / self.tokens
        result: dict[str, Any] = {"perplexity": perplexity(nll), "nll": nll, "tokens": self.tokens}
        if self.compared:
            result["kl"] = self._kl / self.compared
            result["top1_agreement"] = self._agree / self.compared
        return result


def perplexity(nll: float) -> float:
    """exp without OverflowError: a model that is certain of wrong tokens has infinite perplexity, which limits then refuse."""
    return math.exp(nll) if nll < 700 else math.inf


@dataclass(frozen=True)
class Quality:
    """Quality of an artifact beside the model that it was made from, as a manifest's `metrics` have it; None: not measured.

    Attributes:
        before, after: perplexity of either.
        kl: mean KL divergence from the model, in nats per token. top1_agreement: share of positions with the same most likely token. Of
            models with different vocabularies there is neither.
        cosine, worst: cosine similarity of an encoder's embeddings, mean and least.
        text: what it was measured on.
    """

    before: float | None = None
    after: float | None = None
    kl: float | None = None
    top1_agreement: float | None = None
    cosine: float | None = None
    worst: float | None = None
    text: str = "held-out text"

    @classmethod
    def of(cls, metrics: Mapping[str, Any]) -> Quality:
        """Read the metrics of a manifest."""
        sides, cosine = (metrics.get("before") or {}, metrics.get("after") or {}), metrics.get("cosine") or {}
        before, after = (side.get("perplexity") for side in sides)
        kl, agreement = metrics.get("kl"), metrics.get("top1_agreement")
        text = metrics.get("text", cls.text)
        return cls(before, after, kl, agreement, cosine.get("mean"), cosine.get("min"), text)

    def rows(self) -> list[tuple[str, str, str, str]]:
        """Rows of a table: what was measured, before, after, and a note."""
        found = []
        if self.before is not None and self.after is not None:
            change = f"{self.after / self.before - 1:+.2%}"
            found.append(("perplexity", f"{self.before:.5g}", f"{self.after:.5g}", change))
        if self.kl is not None:
            found.append(("KL divergence from the original, nats per token", "", f"{self.kl:.5g}", ""))
        if self.top1_agreement is not None:
            found.append(("same most likely token", "", f"{self.top1_agreement:.2%}", ""))
        if self.cosine is not None:
            note = f"worst {self.worst:.5f}"
            found.append(("cosine similarity to the original's embeddings", "", f"{self.cosine:.5f}", note))
        return found


def _log_softmax(logits: torch.Tensor, whose: str) -> torch.Tensor:
    values = torch.log_softmax(logits.float(), dim=-1)
    if bool(torch.isnan(values).any()):
        raise CompressError(f"{whose} gives logits that are NaN or infinite")
    return values
