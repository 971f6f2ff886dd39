"""Split of a user's text into a part for calibration and training, and a part held out for evaluation.

It depends on the text alone, not on seeds, sample counts or the tokenizer, so that it is the same for all stages and models.
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
"""Characters at the beginning of a text, about two million tokens, that are split; nothing after them is held out."""

LONG = 400_000
"""Characters from which an eighth is held out. Of shorter texts a quarter is, for enough rows."""

PIECES = 16
"""Documents longer than this fraction (1/16) of the text are cut into pieces."""

TOKENS = 65_536
"""Largest number of held-out tokens that are evaluated: more takes time and hardly changes the result."""

_ADVICE = "; give more text, or name another text in evaluate.data"
_LINE = 200  # characters in which a cut looks for the end of a line, or of a word


@dataclass(frozen=True)
class Text:
    """Documents that a section names.

    Attributes:
        documents: read lazily. where: description, for messages.
        kind: `bundled`, `held out` or `named`.
        named: the set, for messages.
        advice: what to do if the text is too short; empty: nothing but to give more.
    """

    documents: Iterator[str]
    where: str
    kind: str
    named: TextSet
    advice: str = ""


def calibration_texts(config: CalibrationConfig, tokenizer: Any) -> list[Text]:
    """Text for calibration and training, of each set that the section names."""
    return [_calibration(config, named, tokenizer) for named in config.texts]


def _calibration(config: CalibrationConfig, named: TextSet, tokenizer: Any) -> Text:
    texts, where = documents(named, "calibration", tokenizer, split_paragraphs=not config.packing)
    if named.data == BUNDLED:
        return Text(texts, where, BUNDLED, named)
    if config.shared:
        return Text(rest(texts), f"{where} without its held-out part", "named", named, _ADVICE)
    return Text(texts, where, "named", named)


def evaluation_texts(config: EvaluateConfig, calibration: CalibrationConfig | None, tokenizer: Any) -> list[Text]:
    """Evaluation text: the sets that the section names, else the held-out part of each set that `calibration` names."""
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
    """Description of several texts, each with its share, and their common kind."""
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
    """Held-out documents and pieces of long ones, ordered so that any prefix is spread over the text."""
    read, _ = _read(texts)
    return spread([text for text, out in _split(read) if out])


def spread(parts: Sequence[T]) -> list[T]:
    """The parts in another order, in which any first few are spread over all."""
    bits = len(parts).bit_length()
    return [parts[i] for i in sorted(range(len(parts)), key=lambda i: f"{i:0{bits}b}"[::-1])]


def rest(texts: Iterable[str]) -> Iterator[str]:
    """The documents that are not held out, in order, without duplicates of held-out ones."""
    read, more = _read(texts)
    parts = list(_split(read))
    out = {text.strip() for text, out in parts if out}
    yield from (text for text, _ in parts if text.strip() not in out)
    yield from (text for text in more if text.strip() not in out)


def choose(sizes: Sequence[int], share: float) -> list[bool]:
    """For each part of a text whether it is held out: about `share` of the total size, spread evenly."""
    found, owed = [], 0.0
    for size in sizes:
        owed += share * size
        out = owed >= size / 2
        owed -= size * out
        found.append(out)
    return found


def _read(texts: Iterable[str]) -> tuple[list[str], Iterator[str]]:
    """The documents within the first `READ` characters, and those after them."""
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
    """A document in pieces of about equal length, about `most` characters, cut at the end of a line or word if possible.
    Conversations are not cut."""
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
