"""Rows of token ids for calibration and for evaluation, the same for the same recipe on every machine."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.utils.rnn import pad_sequence

from compress.data.held_out import TOKENS, Text, calibration_text, evaluation_text
from compress.data.tokens import check_vocabulary, encode
from compress.recipe import Recipe, Stage
from compress.recipe.models import CalibrationConfig, EvaluateConfig
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
    """What the model is evaluated on.

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
        """Of rows of text."""
        return cls(ids, len(ids), ids.numel(), f"{where}, {len(ids)} rows of {ids.shape[1]} tokens", kind, hashed(ids))


@dataclass(frozen=True)
class TextReader:
    """How a model reads text.

    Attributes:
        tokenizer: gives the model's. vocab_size: entries of the vocabulary.
        limit: tokens that the model reads at most; None: any number.
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
        """What a user should know of calibration on such data before any work."""
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
        config: the `calibration` section; what it leaves for evaluation is in no row.
        tokenizer: the model's Hugging Face tokenizer.
        vocab_size: entries of the model's vocabulary.

    Raises:
        RequestError: no text, less text than one row, ids outside the vocabulary, unreadable data.
    """
    text = calibration_text(config, tokenizer)
    where = text.where
    encoded = encode(text.documents, tokenizer, separate=config.packing)
    wanted = config.samples * config.sequence_length
    documents_read = list(_take(encoded, max(ENOUGH * wanted, ENOUGH_TOKENS)))
    if not documents_read:
        raise RequestError(
            text.named.at("data", f"{where} holds no text; the least is {config.sequence_length} tokens{text.advice}")
        )
    if config.packing:
        rows = draw(windows(_joined(documents_read), config.sequence_length, text), config)
        mask = torch.ones_like(rows, dtype=torch.bool)
    else:
        rows, mask = _padded(config, documents_read, tokenizer)
    check_vocabulary(rows[mask], vocab_size, text.named, where)
    warning = ""
    if len(rows) < config.samples:
        unit = f"rows of {config.sequence_length} tokens" if config.packing else "documents"
        warning = config.at("samples", f"{where} has only {len(rows)} {unit}; {config.samples} were asked for")
    tokens = int(mask.sum())
    kind = "packed" if config.packing else "padded"
    shape = f"{len(rows)} {kind} rows of {rows.shape[1]} tokens"
    return CalibrationData(
        batches=list(zip(rows.split(config.batch_size), mask.split(config.batch_size), strict=True)),
        tokens=tokens,
        rows=len(rows),
        description=f"{shape} from {where}, seed {config.seed} ({tokens:,} tokens)",
        kind=text.kind,
        sha256=digest([(rows, mask)]),
        warning=warning,
    )


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
        calibration: the section whose text is evaluated on where `config` names none.

    Raises:
        RequestError: as `load`.
    """
    text = evaluation_text(config, calibration, tokenizer)
    encoded = encode(text.documents, tokenizer, separate=True)
    count = row_limit(config, text)
    ids = _joined(encoded if count is None else _take(encoded, count * config.sequence_length))
    rows = windows(ids, config.sequence_length, text)[:count]
    if vocab_size is not None:
        check_vocabulary(rows, vocab_size, text.named, text.where)
    return EvaluationData.of(rows, text.where, text.kind)


def row_limit(config: EvaluateConfig, text: Text) -> int | None:
    """Most rows that are evaluated; None: all."""
    if text.kind != "held out":
        return config.samples
    most = max(1, TOKENS // config.sequence_length)
    return most if config.samples is None else min(most, config.samples)


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


def _padded(config: CalibrationConfig, read: list[list[int]], tokenizer: Any) -> tuple[torch.Tensor, torch.Tensor]:
    fill = tokenizer.pad_token_id
    fill = (tokenizer.eos_token_id or 0) if fill is None else fill
    cut = [torch.tensor(ids[: config.sequence_length]) for ids in read]
    rows = pad_sequence(cut, batch_first=True, padding_value=fill)
    mask = pad_sequence([torch.ones_like(ids, dtype=torch.bool) for ids in cut], batch_first=True)
    chosen = draw(torch.arange(len(read)), config)
    return rows[chosen], mask[chosen]


def draw(rows: torch.Tensor, config: CalibrationConfig) -> torch.Tensor:
    """`samples` of the rows, by seed; all of them, in order, when there are no more than that."""
    if len(rows) <= config.samples:
        return rows
    generator = torch.Generator().manual_seed(config.seed)
    return rows[torch.randperm(len(rows), generator=generator)[: config.samples]]


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
