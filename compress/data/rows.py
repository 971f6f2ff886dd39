"""Rows of token ids for calibration and for evaluation, the same for the same recipe on every machine."""

from __future__ import annotations

import hashlib
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.utils.rnn import pad_sequence

from compress.data.held_out import HELD_OUT, TOKENS, Text, apportion, calibration_texts, evaluation_texts, mixed
from compress.data.tokens import check_vocabulary, encode
from compress.recipe import Recipe, Stage
from compress.recipe.models import BUNDLED, CalibrationConfig, EvaluateConfig
from runtime.errors import RequestError

ENOUGH = 16
"""Reading stops after this many times the tokens that are asked for; the draw is from what was read."""

ENOUGH_TOKENS = 2_000_000
"""... but not before this many tokens, so that small requests still see the whole of a small file."""

PROBE_TOKENS = 64


@dataclass
class CalibrationData:
    """What the model is calibrated on.

    Attributes:
        batches: `(input_ids [b, s] int64, attention_mask [b, s] bool)` pairs; True = a token, False = padding (right).
        tokens: tokens that are not padding.
        rows: rows drawn.
        description: one line, for the log and the report.
        kind: `bundled` or `named` (by the recipe).
        sha256: of shapes, ids and masks.
        warning: a sentence the user should see (fewer rows than asked for), or empty.
    """

    batches: list[tuple[torch.Tensor, torch.Tensor]]
    tokens: int
    rows: int
    description: str
    kind: str
    sha256: str
    warning: str = ""


@dataclass(frozen=True)
class EvaluationData:
    """Rows for evaluation.

    Attributes:
        ids: int64 `[rows, sequence_length]`.
        rows, tokens: numbers of them.
        description: a phrase: "the held-out part of the file mine.txt, 128 rows of 256 tokens".
        kind: `bundled`, `held out` (of the calibration text) or `named` (by the recipe).
        sha256: of the ids.
    """

    ids: torch.Tensor
    rows: int
    tokens: int
    description: str
    kind: str
    sha256: str

    @classmethod
    def of(cls, ids: torch.Tensor, where: str, kind: str) -> EvaluationData:
        """Evaluation data of rows of text, int64 `[n, s]`."""
        return cls(ids, len(ids), ids.numel(), f"{where}, {len(ids)} rows of {ids.shape[1]} tokens", kind, hashed(ids))


@dataclass(frozen=True)
class TextReader:
    """Reader of calibration and evaluation text for a model.

    Attributes:
        tokenizer: returns the model's tokenizer. vocab_size: entries of the vocabulary.
        limit: the model's context in tokens; None: no limit.
    """

    tokenizer: Callable[[], Any]
    vocab_size: int
    limit: int | None

    def calibration(self, config: CalibrationConfig) -> CalibrationData:
        """As `load`."""
        return load(config, self.tokenizer(), self.vocab_size)

    def evaluation(self, config: EvaluateConfig, calibration: CalibrationConfig) -> EvaluationData:
        """As `load_evaluation`."""
        return load_evaluation(config, self.tokenizer(), self.vocab_size, calibration)

    def warnings(self, config: CalibrationConfig) -> list[str]:
        """Warnings about calibration on such data, before any work."""
        return []

    def probe(self) -> torch.Tensor:
        """A row `[1, n]` of random tokens."""
        length = min(PROBE_TOKENS, self.limit or PROBE_TOKENS)
        return torch.randint(0, self.vocab_size, (1, length), generator=torch.Generator().manual_seed(0))


def load(config: CalibrationConfig, tokenizer: Any, vocab_size: int) -> CalibrationData:
    """Read, tokenize and draw the calibration rows.

    With packing, documents are laid end to end, cut into rows of `sequence_length`, and `samples` of these are drawn by
    `seed` without overlap. With padding, each document is a row of its own (longer ones are cut).

    Args:
        config: the `calibration` section; text held out for evaluation is in no row.
        tokenizer: the model's Hugging Face tokenizer.
        vocab_size: entries of the model's vocabulary.

    Raises:
        RequestError: no text, less text than one row, ids outside the vocabulary, unreadable data.
    """
    texts = calibration_texts(config, tokenizer)
    parts, warnings = [], []
    for text, count in zip(texts, portions(config), strict=True):
        rows, mask = _drawn(config, count, text, tokenizer)
        check_vocabulary(rows[mask], vocab_size, text.named, text.where)
        parts.append((rows, mask))
        if len(rows) < count:
            unit = f"rows of {config.sequence_length} tokens" if config.packing else "documents"
            warnings.append(
                f"{text.where} has only {len(rows)} {unit}; {count} {'are recommended' if config.is_auto('samples') else 'were asked for'}"
            )
    if warnings:  # proportions count for more than the number
        kept = balanced(config.samples, texts, [len(rows) for rows, _ in parts])
        chosen = [draw(torch.arange(len(part[0])), config, count) for part, count in zip(parts, kept, strict=True)]
        parts = [(rows[some], mask[some]) for (rows, mask), some in zip(parts, chosen, strict=True)]
    rows, mask = _together(parts, config, tokenizer)
    where, kind = mixed(texts)
    tokens = int(mask.sum())
    shape = f"{len(rows)} {'packed' if config.packing else 'padded'} rows of {rows.shape[1]} tokens"
    return CalibrationData(
        batches=list(zip(rows.split(config.batch_size), mask.split(config.batch_size), strict=True)),
        tokens=tokens,
        rows=len(rows),
        description=f"{shape} from {where}, seed {config.seed} ({tokens:,} tokens)",
        kind=BUNDLED if kind == BUNDLED else "named",
        sha256=digest([(rows, mask)]),
        warning=config.at("samples", "; ".join(warnings)) if warnings else "",
    )


def portions(config: CalibrationConfig) -> list[int]:
    """Rows of each text of a section; RequestError where one gets none."""
    counts = apportion(config.samples, [named.share for named in config.texts])
    for named, count in zip(config.texts, counts, strict=True):
        if count == 0:
            reason = f"a share of {100 * named.share:.2g}% gives none of {config.samples} rows; raise it, or calibration.samples"
            raise RequestError(named.at("weight", reason))
    return counts


def _drawn(config: CalibrationConfig, count: int, text: Text, tokenizer: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """`count` rows of a text, or all if there are fewer, and their masks; each `[n, s]`."""
    encoded = encode(text.documents, tokenizer, separate=config.packing)
    read = list(_take(encoded, max(ENOUGH * count * config.sequence_length, ENOUGH_TOKENS)))
    if not read:
        reason = f"{text.where} holds no text; at least {config.sequence_length} tokens are needed{text.advice}"
        raise RequestError(text.named.at("data", reason))
    if config.packing:
        rows = draw(windows(_joined(read), config.sequence_length, text), config, count)
        return rows, torch.ones_like(rows, dtype=torch.bool)
    rows, mask = _padded([torch.tensor(ids[: config.sequence_length]) for ids in read], tokenizer)
    chosen = draw(torch.arange(len(read)), config, count)
    return rows[chosen], mask[chosen]


def _together(
    parts: Sequence[tuple[torch.Tensor, torch.Tensor]], config: CalibrationConfig, tokenizer: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows of one text unchanged; rows of several texts shuffled, so that any part has rows of each."""
    if len(parts) == 1:
        return parts[0]
    if config.packing:
        rows = torch.cat([rows for rows, _ in parts])
        mask = torch.ones_like(rows, dtype=torch.bool)
    else:
        rows, mask = _padded([row[kept] for part in parts for row, kept in zip(*part, strict=True)], tokenizer)
    order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(config.seed))
    return rows[order], mask[order]


def load_training(recipe: Recipe, stage: Stage, tokenizer: Any, vocab_size: int) -> tuple[CalibrationData, list[str]]:
    """Calibration text in the rows of a stage that trains (its `samples` and `sequence_length`), and warnings.

    Raises:
        RequestError: with file and line, where rows are not full, or there are not two, one of which is held out.
    """
    name, length, count = f"the {stage.kind} stage", stage.config.sequence_length, stage.config.samples
    config = recipe.calibration.model_copy(update={"samples": count, "sequence_length": length})
    if not config.packing:
        raise RequestError(config.at("packing", f"{name} is trained on full rows; set packing: true"))
    data = load(config, tokenizer, vocab_size)
    if data.rows < 2:
        text = f"{name} needs two rows of {length} tokens, one of them to be held out, and the text has one"
        raise RequestError(config.at("data", text))
    if data.rows >= count:
        return data, []
    text = f"the text has only {data.rows} rows of {length} tokens; {count} were asked for"
    return data, [recipe.origin.at((*stage.path, "samples"), text)]


def load_evaluation(
    config: EvaluateConfig, tokenizer: Any, vocab_size: int | None = None, calibration: CalibrationConfig | None = None
) -> EvaluationData:
    """The evaluation rows: windows without overlap from the start of the text, in order.

    Args:
        config: the `evaluate` section; `samples` limits the rows.
        tokenizer: the model's Hugging Face tokenizer.
        vocab_size: entries of the model's vocabulary; None leaves ids unchecked.
        calibration: the section whose held-out text is used if `config` names none.

    Raises:
        RequestError: as `load`.
    """
    texts = evaluation_texts(config, calibration, tokenizer)
    found = []
    for text in texts:
        count = row_limit(config, text)
        encoded = encode(text.documents, tokenizer, separate=True)
        ids = _joined(encoded if count is None else _take(encoded, count * config.sequence_length))
        found.append(windows(ids, config.sequence_length, text)[:count])
    parts = [
        rows[:count] for rows, count in zip(found, balanced(config.samples, texts, list(map(len, found))), strict=True)
    ]
    if vocab_size is not None:
        for rows, text in zip(parts, texts, strict=True):
            check_vocabulary(rows, vocab_size, text.named, text.where)
    return EvaluationData.of(torch.cat(parts), *mixed(texts))


def row_limit(config: EvaluateConfig, text: Text) -> int | None:
    """Largest number of rows of a text that are evaluated; None: all."""
    most = config.samples
    if text.kind == HELD_OUT:
        enough = max(1, TOKENS // config.sequence_length)
        most = enough if most is None else min(most, enough)
    return None if most is None else max(1, math.ceil(most * text.named.share))


def balanced(samples: int | None, texts: Sequence[Text], there: Sequence[int]) -> list[int]:
    """Number of rows taken from each text, in proportion to the shares, at least one each.

    Args:
        samples: largest total; None: no limit.
    """
    if len(texts) == 1:
        return list(there)
    shares = [text.named.share for text in texts]
    total = min(int(count / share) for count, share in zip(there, shares, strict=True))
    if samples is not None:
        total = min(total, samples)
    return [min(most, max(1, count)) for count, most in zip(apportion(total, shares), there, strict=True)]


def _take(encoded: Iterator[list[int]], tokens: int) -> Iterator[list[int]]:
    """Documents until they hold `tokens` tokens."""
    total = 0
    for ids in encoded:
        yield ids
        total += len(ids)
        if total >= tokens:
            return


def _joined(encoded: Iterator[list[int]] | list[list[int]]) -> torch.Tensor:
    return torch.tensor(list(itertools.chain.from_iterable(encoded)), dtype=torch.int64)


def windows(ids: torch.Tensor, length: int, text: Text) -> torch.Tensor:
    """Running text, int64 `[n]`, as rows `[n // length, length]`.

    Raises:
        RequestError: it is shorter than one row.
    """
    count = len(ids) // length
    if count == 0:
        reason = f"{text.where} has {len(ids)} tokens, which is less than one row of sequence_length {length}"
        raise RequestError(text.named.at("data", reason + text.advice))
    return ids[: count * length].reshape(count, length)


def _padded(rows: Sequence[torch.Tensor], tokenizer: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows `[s]` of several lengths, padded to `[n, s]`, and a mask that is True for tokens."""
    fill = tokenizer.pad_token_id
    fill = (tokenizer.eos_token_id or 0) if fill is None else fill
    mask = pad_sequence([torch.ones_like(ids, dtype=torch.bool) for ids in rows], batch_first=True)
    return pad_sequence(list(rows), batch_first=True, padding_value=fill), mask


def draw(rows: torch.Tensor, config: CalibrationConfig, count: int | None = None) -> torch.Tensor:
    """`count` of the rows (default: `samples`), by seed; all of them, in order, when there are no more than that."""
    count = config.samples if count is None else count
    if len(rows) <= count:
        return rows
    generator = torch.Generator().manual_seed(config.seed)
    return rows[torch.randperm(len(rows), generator=generator)[:count]]


def hashed(rows: torch.Tensor) -> str:
    """SHA-256 (hex) of ids."""
    return hashlib.sha256(rows.numpy().tobytes()).hexdigest()


def digest(batches: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> str:
    """SHA-256 (hex) of shapes, ids and masks."""
    sha256 = hashlib.sha256()
    for rows, mask in batches:
        sha256.update(repr(tuple(rows.shape)).encode())
        sha256.update(rows.numpy().tobytes())
        sha256.update(mask.numpy().tobytes())
    return sha256.hexdigest()
