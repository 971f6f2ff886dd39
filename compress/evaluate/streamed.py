"""Quality of an artifact against its source, both streamed block by block, so that evaluation needs no more memory than compression."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from compress.core.progress import Reporter
from compress.data.spans import Spans
from compress.evaluate.limits import check, contradiction
from compress.evaluate.metrics import TokenMetrics, perplexity
from compress.model.context import OTHER_TOKENS, Context
from compress.model.streamed import Batch, HiddenStates, StreamedModel, run_blocks
from runtime.api.pooling import read_pooling
from runtime.engines.torch.encoder import position_limit
from runtime.layers.unrounded import behind

LOGIT_ROWS = 512
"""Positions whose logits are computed at a time; they take this times the vocabulary times 4 bytes."""


@dataclass(frozen=True)
class Comparison:
    """An artifact beside its source.

    Attributes:
        batch_size: rows that go through a block at a time.
        spill: directory of hidden states; None: they stay in memory.
    """

    source: StreamedModel
    artifact: StreamedModel
    batch_size: int
    spill: Path | None
    reporter: Reporter

    @torch.inference_mode()
    def tokens(self, windows: torch.Tensor) -> dict[str, Any]:
        """Perplexity of both models on `windows` `[n, s]` int64 (every token but the first of a window is scored), KL and agreement.

        The artifact reads its prefix tokens, if it has any, before each window.
        An encoder-decoder reads the first half of a window and is scored on the rest, given token by token; a speech model is scored on
        transcripts.

        Returns:
            {"before": {...}, "after": {...}, "kl", "top1_agreement", "tokens"}: KL(source || artifact) in nats per token.
        """
        prefix = len(self.artifact.prefix)
        before, after = self._run_both(windows, behind(self.artifact.prefix, windows))
        base, ours = TokenMetrics(), TokenMetrics()
        with self.source.outside(), self.artifact.outside():
            for number, part, ids in _parts(self.source, windows, self.batch_size):
                targets, reference = _predictions(self.source, before, number, part, ids)
                _, logits = _predictions(self.artifact, after, number, part, ids, prefix)
                base.add(reference, targets)
                ours.add(logits, targets, reference_logits=reference)
        before.drop()
        after.drop()
        measured = ours.result()
        return {
            "before": {"perplexity": base.result()["perplexity"]},
            "after": {"perplexity": measured["perplexity"]},
            **{name: measured[name] for name in ("kl", "top1_agreement", "tokens")},
        }

    def embeddings(self, windows: torch.Tensor, source_windows: torch.Tensor) -> dict[str, Any]:
        """Cosine similarity of the pooled embeddings of each window of `windows` `[n, s]` int64, source against artifact.

        Args:
            source_windows: the same tokens by the source's ids.

        Returns:
            {"cosine": {"mean", "min"}, "windows", "tokens"}; pooled as the checkpoint's sentence-transformers files say, else by the mean.
        """
        pooling = read_pooling(self.source.checkpoint.path)
        before, after = self._run_both(source_windows, windows)
        found = []
        with self.source.outside(), self.artifact.outside():
            for number in range(math.ceil(len(windows) / self.batch_size)):
                one, other = (
                    pooling(model.outputs(states.get(number).to(model.device)).float(), None).double().cpu()
                    for model, states in ((self.source, before), (self.artifact, after))
                )
                found.append(torch.nn.functional.cosine_similarity(one, other, dim=1))
        before.drop()
        after.drop()
        cosine = torch.cat(found)
        return {
            "cosine": {"mean": float(cosine.mean()), "min": float(cosine.min())},
            "windows": len(windows),
            "tokens": windows.numel(),
        }

    def texts(self, theirs: Spans, ours: Spans) -> dict[str, Any]:
        """Perplexity of both models on a text that each reads with its own tokenizer, because the artifact's vocabulary was cut.

        There is no common distribution over tokens to compare, so losses are compared by character.

        Args:
            theirs: the text for the source. ours: for the artifact.

        Returns:
            {"before": {...}, "after": {...}} with "perplexity" and "bits_per_character"; "tokens" of the source that were scored;
            "tokens_each": mean number of the artifact's tokens that span one of the source's; "reason" why there is no KL divergence.
            Perplexity is per token of the source on both sides: exp of the mean loss per character times the characters of such a token.
        """
        self.reporter.phase("evaluate", 2 * len(self.source.blocks))
        nll, characters, tokens = [], [], []
        for name, model, spans in (("source", self.source, theirs), ("artifact", self.artifact, ours)):
            metrics = score(model, spans.ids, self.batch_size, self._spill(name), partial(self._step, name))
            nll.append(metrics["nll"] * metrics["tokens"])
            tokens.append(metrics["tokens"])
            characters.append(int(model.rows.labels(spans.characters).sum()))
        each = characters[0] / tokens[0]
        before, after = (
            {"perplexity": perplexity(loss / count * each), "bits_per_character": loss / count / math.log(2)}
            for loss, count in zip(nll, characters, strict=True)
        )
        tokens_each = tokens[1] / characters[1] * each
        return {
            "before": before, "after": after, "tokens": tokens[0], "tokens_each": tokens_each, "reason": OTHER_TOKENS,
        }  # fmt: skip

    def _run_both(self, source_windows: torch.Tensor, windows: torch.Tensor) -> tuple[HiddenStates, HiddenStates]:
        self.reporter.phase("evaluate", 2 * len(self.source.blocks))
        return self._run("source", self.source, source_windows), self._run("artifact", self.artifact, windows)

    def _run(self, name: str, model: StreamedModel, windows: torch.Tensor) -> HiddenStates:
        return _run(model, windows, self.batch_size, self._spill(name), partial(self._step, name))

    def _spill(self, name: str) -> Path | None:
        return self.spill and self.spill / f"eval-{name}"

    def _step(self, name: str, block: int) -> None:
        self.reporter.step(f"{name} block {block}")


def evaluate_artifact(
    context: Context, artifact: StreamedModel, limits: Mapping[str, float], spill: Path | None, reporter: Reporter
) -> dict[str, Any]:
    """Quality before and after on the recipe's evaluation text, with its limits checked. Empty without `evaluate` in the recipe.

    Args:
        limits: see `compress.evaluate.limits.limits`.
        spill: directory of hidden states; None: they stay in memory.
    """
    config, windows = context.recipe.evaluate, context.windows
    if config is None or windows is None:
        return {}
    if not context.checkpoint_is_finite:
        reporter.warn("the source holds NaN or Inf, so its quality was not measured")
        return {}
    limit = position_limit(context.streamed.model)
    if artifact.prefix and limit is not None:  # its prefix tokens take places of the context
        windows = windows[:, : limit - len(artifact.prefix)]
    comparison = Comparison(context.reference, artifact, config.batch_size, spill, reporter)
    if context.streamed.kind == "encoder":
        metrics = comparison.embeddings(windows, context.source_ids(windows) if context.kept_tokens else windows)
    elif context.kept_tokens:
        metrics = comparison.texts(*context.same_text())
    else:
        metrics = comparison.tokens(windows)
    if "after" in metrics:
        metrics["perplexity_increase"] = metrics["after"]["perplexity"] / metrics["before"]["perplexity"] - 1.0
    assert context.evaluation is not None
    metrics["text"] = context.evaluation.description
    metrics["sequence_length"] = context.streamed.rows.length(windows)
    if warning := contradiction(metrics):
        reporter.warn(warning)
        metrics["warning"] = warning
    metrics["limits"] = check(metrics, limits)
    return metrics


@torch.inference_mode()
def score(
    model: StreamedModel,
    windows: torch.Tensor,
    batch_size: int = 8,
    spill: Path | None = None,
    on_block: Callable[[int], None] | None = None,
) -> dict[str, Any]:
    """`TokenMetrics.result` of one model on `windows`, int64 `[n, s]`; other arguments as of `Comparison` and `run_blocks`."""
    states = _run(model, windows, batch_size, spill, on_block)
    metrics = TokenMetrics()
    with model.outside():
        for number, part, ids in _parts(model, windows, batch_size):
            targets, logits = _predictions(model, states, number, part, ids)
            metrics.add(logits, targets)
    states.drop()
    return metrics.result()


def _run(
    model: StreamedModel,
    windows: torch.Tensor,
    batch_size: int,
    spill: Path | None,
    on_block: Callable[[int], None] | None,
) -> HiddenStates:
    """Hidden states after the last block, by batch."""
    batches: list[Batch] = [(rows, None) for rows in windows.split(batch_size)]
    return run_blocks(model, batches, spill, on_block)


def _parts(model: StreamedModel, windows: torch.Tensor, batch_size: int) -> Iterator[tuple[int, slice, torch.Tensor]]:
    """(batch, its rows, their ids), about `LOGIT_ROWS` positions at a time."""
    for number, ids in enumerate(windows.split(batch_size)):
        rows = max(1, LOGIT_ROWS // model.rows.length(ids))
        for start in range(0, len(ids), rows):
            yield number, slice(start, start + rows), ids[start : start + rows]


def _predictions(
    model: StreamedModel, states: HiddenStates, number: int, part: slice, ids: torch.Tensor, prefix: int = 0
) -> tuple[torch.Tensor, torch.Tensor]:
    """The scored tokens of some rows, int64 `[n]`, and the logits that predict them, `[n, vocabulary]`; `prefix`: tokens before `ids`."""
    targets = model.rows.labels(ids).reshape(-1)
    logits = model.outputs(states.get(number)[part, prefix:].to(model.device), ids)[:, :-1].flatten(0, 1)
    scored = targets >= 0
    return (targets, logits) if bool(scored.all()) else (targets[scored], logits[scored.to(logits.device)])
