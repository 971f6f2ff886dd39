"""Whether a model reads a text at all: its perplexity beside that of word frequencies alone."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

from compress.evaluate.metrics import perplexity
from compress.evaluate.streamed import score

if TYPE_CHECKING:
    from compress.model.context import Context

#: Tokens that the model is judged by.
JUDGED = 2048


def doubt(context: Context) -> str:
    """A sentence where the recipe's model does not read the recipe's text, so that numbers measured on it say little; empty: it does.

    The model runs once over `JUDGED` tokens, block by block. Only decoders are judged: encoders predict nothing, encoder-decoders read such
    rows as halves, and models of speech have transcripts.
    """
    text = _text(context)
    if text is None or context.reference.kind != "decoder" or context.speech is not None:
        return ""
    vocabulary = context.reference.vocabulary
    rows = text[: max(1, JUDGED // text.shape[1])]
    found, frequencies = score(context.reference, rows)["nll"], unigram_loss(text, vocabulary)
    if found <= min(frequencies, math.log(vocabulary)):
        return ""
    than = (
        f"that of guessing among its {vocabulary:,} tokens"
        if found > math.log(vocabulary)
        else f"{perplexity(frequencies):.4g} of word frequencies alone (a unigram model)"
    )
    return (
        f"{context.original.path} does not read the text: its perplexity there is {perplexity(found):.4g}, worse than {than}; "
        "what is measured on this text says little of the artifact, so give calibration.data of the kind that the model is for"
    )


def _text(context: Context) -> torch.Tensor | None:
    """The text in the tokens of the recipe's model, `[n, s]`; None where no text is read."""
    if context.windows is not None:
        return context.same_text()[0].ids if context.kept_tokens else context.windows
    return context.source_ids(context.calibration.batches[0][0]) if context.reads_text else None


def unigram_loss(text: torch.Tensor, vocabulary: int) -> float:
    """Mean loss, in nats per token, of a model that knows how often each token occurs in `text` (int64) and nothing else.

    Every token is predicted from the counts of all others, with half a count for each of the vocabulary (Krichevsky and Trofimov, 1981),
    so that a short text is not known by heart.
    """
    counts = torch.bincount(text.flatten(), minlength=vocabulary).double()
    others = (counts - 1).clamp_min(0) + 0.5
    total = text.numel() - 1 + 0.5 * vocabulary
    return float(-(counts * (others / total).log()).sum() / text.numel())
