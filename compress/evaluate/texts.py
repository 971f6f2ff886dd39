"""Calibration and evaluation text of a run: description, and warnings where it does not suit the model."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from compress.core.resources import is_bundled
from compress.data.layout import ImageRows
from compress.evaluate.metrics import perplexity
from compress.evaluate.streamed import score
from compress.recipe.models import BUNDLED
from runtime.errors import CompressError

if TYPE_CHECKING:
    from compress.model.context import Context

#: Tokens on which the source model is judged. Their losses differ by about 3 nats, so the mean of so many is known to 0.13: enough to
#: tell a model that reads the text (2 to 4 nats) from one that does not (6 and more).
JUDGED = 512
#: Part of the loss of guessing that a model has at most on text that it reads: a perplexity of 147 with 4,096 tokens, 1,160 with 128,000.
PLAUSIBLE = 0.6


def describe(calibration: Mapping[str, Any] | None, evaluation: Mapping[str, Any] | None) -> str:
    """The texts of a manifest: "Calibrated on 128 packed rows ...; evaluated on ..."; empty if there are none."""
    parts = [("calibrated", calibration), ("evaluated", evaluation)]
    told = "; ".join(f"{done} on {text['description']}" for done, text in parts if text)
    return told[:1].upper() + told[1:]


def of_context(context: Context) -> str:
    """`describe` before the run."""
    texts = (context.calibration if context.reads_text else None, context.evaluation)
    return describe(*(None if text is None else {"description": text.description} for text in texts))


def bundled(context: Context) -> list[str]:
    """A warning if the bundled text is used for a model that is not bundled."""
    texts = {"calibrated": context.calibration if context.reads_text else None, "evaluated": context.evaluation}
    done = [name for name, text in texts.items() if text is not None and text.kind == "bundled"]
    if not done or is_bundled(context.original.path):
        return []
    return [
        f"{' and '.join(done)} on bundled Python source, which may be nothing like what this model reads; give text like its own in "
        "calibration.data"
    ]


def overlap(context: Context) -> list[str]:
    """A warning for each text that the recipe evaluates on, by name, although the model is calibrated on it."""
    config = context.recipe.evaluate
    if config is None or config.data is None or not context.reads_text:
        return []
    seen = {text.identity for text in context.recipe.calibration.texts}
    return [
        text.at(
            "data",
            f"'{text.data}' is the calibration text too, so its numbers look better than they are; without this key a part is held out",
        )
        for text in config.texts
        if text.data != BUNDLED and text.identity in seen
    ]


def doubt(context: Context) -> list[str]:
    """A warning if the source model predicts the recipe's text worse than a unigram model, or implausibly badly, so that metrics on it mean
    little.

    The model runs once over `JUDGED` tokens, block by block. Only decoders are judged: encoders predict nothing, and encoder-decoders
    split such rows in halves.
    """
    text = _text(context) if context.reference.kind == "decoder" else None
    if text is None:
        return []
    vocabulary = context.reference.vocabulary
    count = max(1, JUDGED // context.reference.rows.length(text))
    rows = text[:: max(1, len(text) // count)][:count]  # from all of the text
    tokens = context.reference.rows.labels(text)
    frequencies = unigram_loss(tokens[tokens >= 0], vocabulary)
    try:
        found = score(context.reference, rows)["nll"]
    except CompressError:  # NaN: the run reports the layer
        return []
    guessing = math.log(vocabulary)
    if found > guessing:
        than = f"that of guessing among its {vocabulary:,} tokens"
    elif found > frequencies:
        than = f"that of word frequencies alone, a unigram model's {perplexity(frequencies):.4g}"
    elif found > PLAUSIBLE * guessing:
        than = (
            f"is plausible for a vocabulary of {vocabulary:,} tokens (at most {perplexity(PLAUSIBLE * guessing):.3g})"
        )
    else:
        return []
    where = context.calibration.description if context.evaluation is None else context.evaluation.description
    return [
        f"{context.original.path} cannot predict this text: its perplexity is about {perplexity(found):.3g}, worse than {than} "
        f"({rows.numel():,} tokens of {where}); numbers measured on it say little about the artifact, so give text like the model's own in "
        "calibration.data"
    ]


def _text(context: Context) -> torch.Tensor | None:
    """Text in token ids of the recipe's model, int64 `[n, s]`; None if there is no text or the model has non-finite weights."""
    if not context.checkpoint_is_finite:
        return None
    if context.windows is not None:
        return context.same_text()[0].ids if context.kept_tokens else context.windows
    if not context.reads_text:
        return None
    batches = context.calibration.batches
    if isinstance(context.streamed.rows, ImageRows):  # which tell padding apart themselves
        return batches[0][0]
    ids, mask = (torch.cat(part) for part in zip(*batches, strict=True))
    lengths = mask.sum(dim=1)
    middle = int(lengths.median())  # of padded rows the longer half, cut to be equally long
    return context.source_ids(ids[lengths >= middle][:, :middle]) if middle > 1 else None


def unigram_loss(text: torch.Tensor, vocabulary: int) -> float:
    """Mean loss, in nats per token, of a unigram model of a text, int64 `[n]`.

    Each token is predicted from the counts of all others, plus half a count per vocabulary entry (Krichevsky and Trofimov, 1981), so
    that the model does not memorize a short text.
    """
    counts = torch.bincount(text, minlength=vocabulary).double()
    others = (counts - 1).clamp_min(0) + 0.5
    total = text.numel() - 1 + 0.5 * vocabulary
    return float(-(counts * (others / total).log()).sum() / text.numel())
