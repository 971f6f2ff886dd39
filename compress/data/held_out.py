"""Split of a user's text into what a model is calibrated and trained on, and what is held out for its evaluation.

It depends on the text alone: not on seeds, numbers of rows or the tokenizer, so that all stages and all models of a text agree about it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, TypeVar

from compress.data.chat import Conversation
from compress.data.documents import documents
from compress.recipe.models import BUNDLED, CalibrationConfig, EvaluateConfig, TextSet

HELD_OUT = "held out"

T = TypeVar("T")

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


def calibration_texts(config: CalibrationConfig, tokenizer: Any) -> list[Text]:
    """What is left to calibrate and to train on, of each set that the section names."""
    return [_calibration(config, named, tokenizer) for named in config.texts]


def _calibration(config: CalibrationConfig, named: TextSet, tokenizer: Any) -> Text:
    texts, where = documents(named, "calibration", tokenizer, split_paragraphs=not config.packing)
    if named.data == BUNDLED:
        return Text(texts, where, BUNDLED, named)
    if config.shared:
        return Text(rest(texts), f"{where} without its held-out part", "named", named, _ADVICE)
    return Text(texts, where, "named", named)


def evaluation_texts(config: EvaluateConfig, calibration: CalibrationConfig | None, tokenizer: Any) -> list[Text]:
    """What is evaluated on: the sets that the section names, else of each that `calibration` names what it leaves."""
    shared = calibration is not None and calibration.shared
    return [
        _held_out(calibration, named, tokenizer)
        if shared and calibration is not None and named.data != BUNDLED
        else _evaluation(named, tokenizer)
        for named in (calibration.texts if shared and calibration is not None else config.texts)
    ]


def _held_out(calibration: CalibrationConfig, named: TextSet, tokenizer: Any) -> Text:
    texts, where = documents(named, "calibration", tokenizer, split_paragraphs=not calibration.packing)
    return Text(iter(held_out(texts)), f"the held-out part of {where}", HELD_OUT, named, _ADVICE)


def _evaluation(named: TextSet, tokenizer: Any) -> Text:
    texts, where = documents(named, "heldout", tokenizer, split_paragraphs=False)
    return Text(texts, where, BUNDLED if named.data == BUNDLED else "named", named)


def mixed(texts: Sequence[Text]) -> tuple[str, str]:
    """What several texts are together, each with its share, and their kind."""
    kinds = {text.kind for text in texts}
    kind = HELD_OUT if HELD_OUT in kinds else "named" if "named" in kinds else BUNDLED
    if len(texts) == 1:
        return texts[0].where, kind
    return " + ".join(f"{text.where} ({100 * text.named.share:.3g}%)" for text in texts), kind


def apportion(total: int, shares: Sequence[float]) -> list[int]:
    """Whole numbers that sum to `total`, in proportion to shares that sum to 1 (largest remainders)."""
    found = [int(total * share) for share in shares]
    order = sorted(range(len(shares)), key=lambda i: (found[i] - total * shares[i], i))
    for i in order[: total - sum(found)]:
        found[i] += 1
    return found


def held_out(texts: Iterable[str]) -> list[str]:
    """The documents, and pieces of long ones, that are held out: any first few of them are spread over the text."""
    read, _ = _read(texts)
    return spread([text for text, out in _split(read) if out])


def spread(parts: Sequence[T]) -> list[T]:
    """The parts in another order, in which any first few are spread over all."""
    bits = len(parts).bit_length()
    return [parts[i] for i in sorted(range(len(parts)), key=lambda i: f"{i:0{bits}b}"[::-1])]


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
    """A document in pieces of about equal lengths, `most` characters or little more, which end with a line or word where they can;
    a conversation as a whole."""
    if isinstance(text, Conversation):
        most = len(text)
    count = -(-len(text) // most)
    start = 0
    for number in range(1, count + 1):
        end = len(text) * number // count
        if number < count:
            near = text[end : end + min(_LINE, most // 4)]
            ends = (near.find("\n"), near.find(" "), -1)
            end += next((place for place in ends if place >= 0), -1) + 1
        if text[start:end].strip():
            yield text if count == 1 else text[start:end]
        start = end
