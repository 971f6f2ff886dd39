"""Split of a user's text into what a model is calibrated and trained on, and what is held out for its evaluation.

It depends on the text alone: not on seeds, numbers of rows or the tokenizer, so that all stages and all models of a text agree about it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

from compress.data.documents import documents
from compress.data.tokens import end_of_text
from compress.recipe.models import BUNDLED, CalibrationConfig, EvaluateConfig, TextSet

READ = 8_000_000
"""Characters at the beginning of a text, some two million tokens, of which a part is held out; what follows is not."""

LONG = 400_000
"""Characters from which an eighth is held out; of less a fourth, as few rows say little."""

PIECES = 16
"""A document that is longer than this part of the text is cut into pieces that are not."""

TOKENS = 65_536
"""Tokens of a text of which a part is held out that are evaluated at most: more takes time and hardly changes what is measured."""

_ADVICE = "; give more text, or name another one to evaluate on in evaluate.data"
_LINE = 200  # characters in which a cut looks for the end of a line, or of a word


@dataclass(frozen=True)
class Text:
    """Documents that a section means.

    Attributes:
        documents: read as they are asked for. where: what they are, for messages.
        kind: `bundled`, `held out` or `named`.
        named: by whom, for messages.
        advice: where the text is too little; empty: none but more text.
    """

    documents: Iterator[str]
    where: str
    kind: str
    named: TextSet
    advice: str = ""


def calibration_text(config: CalibrationConfig, tokenizer: Any) -> Text:
    """What is left to calibrate and to train on."""
    text = config.text
    texts, where = documents(text, "calibration", end_of_text(tokenizer), split_paragraphs=not config.packing)
    if config.shared:
        return Text(rest(texts), f"{where} without its held-out part", "named", text, _ADVICE)
    return Text(texts, where, BUNDLED if text.data == BUNDLED else "named", text)


def evaluation_text(config: EvaluateConfig, calibration: CalibrationConfig | None, tokenizer: Any) -> Text:
    """What is evaluated on: the text that the section names, else what `calibration` leaves."""
    if calibration is not None and calibration.shared:
        texts, where = documents(
            calibration.text, "calibration", end_of_text(tokenizer), split_paragraphs=not calibration.packing
        )
        return Text(iter(held_out(texts)), f"the held-out part of {where}", "held out", calibration.text, _ADVICE)
    texts, where = documents(config.text, "heldout", end_of_text(tokenizer), split_paragraphs=False)
    return Text(texts, where, BUNDLED if config.text.data == BUNDLED else "named", config.text)


def held_out(texts: Iterable[str]) -> list[str]:
    """The documents, and pieces of long ones, that are held out: any first few of them are spread over the text."""
    read, _ = _read(texts)
    found = [text for text, out in _split(read) if out]
    bits = len(found).bit_length()
    return [found[i] for i in sorted(range(len(found)), key=lambda i: f"{i:0{bits}b}"[::-1])]


def rest(texts: Iterable[str]) -> Iterator[str]:
    """The others, in order, without such as say the same as one that is held out."""
    read, more = _read(texts)
    parts = list(_split(read))
    out = {text.strip() for text, out in parts if out}
    yield from (text for text, _ in parts if text.strip() not in out)
    yield from (text for text in more if text.strip() not in out)


def choose(sizes: Sequence[int], share: float) -> list[bool]:
    """Which of some parts of a text are held out: about `share` of all, spread evenly."""
    found, owed = [], 0.0
    for size in sizes:
        owed += share * size
        out = owed >= size / 2
        owed -= size * out
        found.append(out)
    return found


def _read(texts: Iterable[str]) -> tuple[list[str], Iterator[str]]:
    """Documents that hold `READ` characters, and those behind them."""
    more = (text for text in texts if text.strip())
    read, size = list[str](), 0
    while size < READ and (some := list(islice(more, 1))):
        read += some
        size += len(some[0])
    return read, more


def _split(read: Sequence[str]) -> Iterator[tuple[str, bool]]:
    """Parts of the documents in order, and whether they are held out."""
    size = sum(map(len, read))
    parts = [part for text in read for part in _cut(text, -(-size // PIECES))]
    yield from zip(parts, choose([len(part) for part in parts], 1 / 8 if size >= LONG else 1 / 4), strict=True)


def _cut(text: str, most: int) -> Iterator[str]:
    """A document in pieces of about equal lengths, `most` characters or little more, which end with a line or word where they can."""
    count = -(-len(text) // most)
    start = 0
    for number in range(1, count + 1):
        end = len(text) * number // count
        if number < count:
            near = text[end : end + min(_LINE, most // 4)]
            ends = (near.find("\n"), near.find(" "), -1)
            end += next((place for place in ends if place >= 0), -1) + 1
        if text[start:end].strip():
            yield text[start:end]
        start = end
