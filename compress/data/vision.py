"""Images with text for the calibration and evaluation of vision-language models, as the checkpoint's own processor reads them."""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch.nn.utils.rnn import pad_sequence

from compress.data.chat import COLUMNS, Conversation, render
from compress.data.documents import column_of, entries, reading
from compress.data.held_out import HELD_OUT, TOKENS, apportion, choose, spread
from compress.data.images import SUFFIXES, load_processor, open_image
from compress.data.layout import ImageRows
from compress.data.rows import CalibrationData, EvaluationData, TextReader, digest, draw, hashed, portions
from compress.data.speech_rows import NOTHING
from compress.data.tokens import check_vocabulary
from compress.recipe.models import BUNDLED, CalibrationConfig, EvaluateConfig, TextSet, TextSource
from runtime.errors import RequestError, first_line

MOST_ROWS = 2048
"""Rows of a set that are read at most; a few hundred are enough."""

_IMAGES = ("images", "image")
_PEEK = 16  # rows that show whether a set has images


def has_images(section: TextSource) -> bool:
    """Whether a section names images with text: a directory of images, or a set whose first rows have some.

    Raises:
        RequestError: as `compress.data.documents`.
    """
    return any(_has_images(named) for named in section.texts)


def _has_images(named: TextSet) -> bool:
    if named.data == BUNDLED:
        return False
    folder = _folder(named)
    if folder is not None:
        return any(_pictures(folder))
    return any(_shows(named, entry) for entry, _ in islice(entries(named), _PEEK))


@dataclass(frozen=True)
class Sample:
    """A row of a set.

    Attributes:
        named: the set. entry: columns of the row. folder: base of relative paths in it. where: name of the row in messages.
    """

    named: TextSet
    entry: Mapping[str, Any]
    folder: Path | None
    where: str

    def refused(self, reason: str) -> RequestError:
        """The error that says why it cannot be used."""
        return RequestError(self.named.at("data", f"{self.where} {reason}"))

    @property
    def keys(self) -> dict[Any, None]:
        """What tells each image of the row from others, in order; of a row without images the row itself."""
        own = map(_own, _image_parts(self.named, self.entry))
        images = [*_images(self.entry), *(image for image in own if image is not None)]
        return dict.fromkeys(map(self._key, images)) or {repr(self.entry): None}

    def _key(self, image: Any) -> Any:
        content = (image.get("bytes") or image.get("path")) if isinstance(image, Mapping) else image
        if isinstance(content, str):
            return ((self.folder or Path()) / content).resolve()
        pixels = getattr(content, "tobytes", None)  # of Pillow's images
        return content if isinstance(content, bytes) else hashlib.sha256(pixels()).digest() if pixels else repr(content)


@dataclass(frozen=True)
class ImageReader(TextReader):
    """Reader of images with text for vision-language models; text alone is read as by `TextReader`, whose attributes it has, and

    Attributes:
        path: the checkpoint. config: its configuration. layout: of rows with images.
    """

    path: Path
    config: Any
    layout: ImageRows

    def calibration(self, config: CalibrationConfig) -> CalibrationData:
        """`samples` rows, drawn by `seed`; those of about equal lengths are a batch, padded right. Text alone: as `TextReader`.

        Raises:
            RequestError: no processor, or a row or an image that cannot be used.
        """
        if not has_images(config):
            return super().calibration(config)
        chosen, told, warnings = list[Sample](), [], []
        for named, count in zip(config.texts, portions(config), strict=True):
            samples, where = _samples(named, config.shared, False)
            chosen += [samples[i] for i in draw(torch.arange(len(samples)), config, count).tolist()]
            told.append(where)
            if len(samples) < count:
                warnings.append(f"{where} has only {len(samples)} rows; {count} were asked for")
        rows = sorted((self._row(config, sample) for sample in chosen), key=len)
        batches = []
        for start in range(0, len(rows), config.batch_size):
            ids = _together(rows[start : start + config.batch_size])
            batches.append((ids, ids != NOTHING))
        tokens = sum(map(len, rows))
        return CalibrationData(
            batches=batches,
            tokens=tokens,
            rows=len(rows),
            description=f"{len(rows)} rows of images with text from {' + '.join(told)}, seed {config.seed} ({tokens:,} tokens)",
            kind="named",
            sha256=digest(batches),
            warning=config.at("samples", "; ".join(warnings)) if warnings else "",
        )

    def evaluation(self, config: EvaluateConfig, calibration: CalibrationConfig) -> EvaluationData:
        """The first rows, at most `samples`, of a held-out part at most `TOKENS` tokens, as ids `[n, s]` padded right with `NOTHING`.
        Text alone: as `TextReader`.

        Raises:
            RequestError: as `calibration`.
        """
        source: TextSource = calibration if calibration.shared else config
        if not has_images(source):
            return super().evaluation(config, calibration)
        found = [_samples(named, calibration.shared, True) for named in source.texts]
        counts = [len(samples) for samples, _ in found]
        if config.samples is not None:
            counts = apportion(config.samples, [named.share for named in source.texts])
        rows = list[torch.Tensor]()
        for (samples, _), named, count in zip(found, source.texts, counts, strict=True):
            left = TOKENS * named.share if calibration.shared else math.inf
            for sample in samples[: max(1, count)]:
                if left > 0:
                    rows.append(self._row(source, sample))
                    left -= len(rows[-1])
        ids = _together(rows)
        where = f"{' + '.join(where for _, where in found)}, {len(rows)} rows of images with text"
        return EvaluationData(
            ids, len(rows), sum(map(len, rows)), where, HELD_OUT if calibration.shared else "named", hashed(ids)
        )

    def warnings(self, config: CalibrationConfig) -> list[str]:
        """A warning that calibration sees no images, if the set has none."""
        if has_images(config):
            return []
        text = "the model also reads images, but is calibrated on text alone; give rows with images (docs/models.md)"
        return [config.at("data", text)]

    # ---------------------------------------------------------------- rows
    @cached_property
    def processor(self) -> Any:
        """transformers' processor of the checkpoint; RequestError if it has none, or the config names no image token."""
        found = load_processor(self.path, self.config)
        if found is None or self.layout.placeholder is None:
            what = "processor (preprocessor_config.json)" if found is None else "image_token_id in config.json"
            raise RequestError(f"{self.path} has no {what} to read images with; add it, or give text without images")
        return found

    def _row(self, source: TextSource, sample: Sample) -> torch.Tensor:
        """Row of a sample, int64 `[n]`, truncated to the section's `sequence_length`."""
        row = self.layout.pack(partial(self._features, sample))
        check_vocabulary(row[row >= 0], self.vocab_size, sample.named, sample.where)
        length = source.sequence_length
        if bool((row[length:] < 0).any()):
            held = f"{len(row)} tokens including those of its images"
            reason = f"{sample.where} has {held}, which are never cut; raise it, or make the images smaller"
            raise RequestError(source.at("sequence_length", reason))
        if len(row) < 2:
            raise sample.refused("holds no text")
        return row[:length]

    def _features(self, sample: Sample) -> dict[str, torch.Tensor]:
        """Tensors that the processor makes of it."""
        processor = self.processor
        text, named = self._text(sample)
        try:
            images = [open_image(value, sample.folder) for value in named]
        except RequestError as error:
            raise sample.refused(f"has an image that cannot be used: {error}") from None
        mark = getattr(processor, "image_token", None)
        written = isinstance(text, Conversation)
        if mark and not written and (count := text.count(mark)) != len(images):
            raise sample.refused(f"has {len(images)} images but {count} placeholders ({mark}) in its text")
        start = self.tokenizer().bos_token
        # A chat template writes what a text begins with.
        options = {"add_special_tokens": False} if written and start and text.startswith(start) else {}
        try:
            found = processor(text=[str(text)], images=images or None, return_tensors="pt", **options)
        except Exception as error:  # each processor has checks of its own
            raise sample.refused(f"cannot be read by the processor of {self.path}: {first_line(error)}") from None
        if images and not bool((found["input_ids"] == self.layout.placeholder).any()):
            raise sample.refused(
                f"has images, for which the processor of {self.path} inserts no token {self.layout.placeholder}"
            )
        return {name: value for name, value in found.items() if isinstance(value, torch.Tensor)}

    def _text(self, sample: Sample) -> tuple[str, list[Any]]:
        """The text of a row for its processor (a `Conversation` if the chat template wrote it), and its images in order.

        An image part names its image, or takes the row's next one. Images without a part come first in the first user message,
        unless the text has placeholders for them.
        """
        entry, mark = sample.entry, getattr(self.processor, "image_token", None) or ""
        images = _images(entry)
        value = entry[column_of(sample.named, entry, sample.where)]
        if isinstance(value, str):
            if not images or (mark and mark in value):
                return value, images
            if not getattr(self.processor, "chat_template", None):
                return mark * len(images) + value, images
            value = [{"role": "user", "content": value}]
        elif not isinstance(value, list):
            raise sample.refused(f"has {type(value).__name__} where a text, or a list of messages, is expected")
        if images and not any(_is_image(part) or (mark and mark in str(part)) for part in _parts(value)):
            value = _led(value, len(images))
        left, placed = list(images), list[Any]()

        def place(part: Mapping[str, Any]) -> Any:
            own = _own(part)
            if own is None and not left:
                raise ValueError(f"there are more image parts than images ({len(images)})")
            placed.append(left.pop(0) if own is None else own)
            return {"type": "image"}

        text = render(sample.named, value, entry.get("tools"), sample.where, self.processor, place)
        if left and placed:
            raise sample.refused(f"has {len(left)} more images than image parts")
        return text, [*placed, *left]


def _led(messages: list[Any], count: int) -> list[Any]:
    """Messages, with `count` image parts at the beginning of the first user message."""
    for number, message in enumerate(messages):
        if isinstance(message, Mapping) and (message.get("role") or message.get("from")) in ("user", "human"):
            key = "content" if message.get("content") is not None else "value"
            content = message.get(key)
            parts = [{"type": "image"}] * count + (content if isinstance(content, list) else [content])
            return [*messages[:number], {**message, key: parts}, *messages[number + 1 :]]
    return messages


def _parts(messages: Any) -> Iterator[Any]:
    """Parts of the contents of messages; a content that is text is one part."""
    for message in messages if isinstance(messages, list) else ():
        if isinstance(message, Mapping):
            content = message.get("content") or message.get("value")
            yield from content if isinstance(content, list) else [content]


def _is_image(part: Any) -> bool:
    return isinstance(part, Mapping) and part.get("type") == "image"


def _own(part: Mapping[str, Any]) -> Any:
    """The image that a part names; None where it stands for one of the row's."""
    return next((part[name] for name in ("image", "path", "url") if part.get(name)), None)


def _together(rows: Sequence[torch.Tensor]) -> torch.Tensor:
    return pad_sequence(list(rows), batch_first=True, padding_value=NOTHING)


def _images(entry: Mapping[str, Any]) -> list[Any]:
    """Images that a row names beside its text."""
    value: Any = next((entry[name] for name in _IMAGES if entry.get(name) is not None), [])
    return list(value) if isinstance(value, (list, tuple)) else [value]


def _image_parts(named: TextSet, entry: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    columns = dict.fromkeys((*COLUMNS, named.text_column))
    return [part for name in columns for part in _parts(entry.get(name)) if _is_image(part)]


def _shows(named: TextSet, entry: Mapping[str, Any] | str) -> bool:
    """Whether a row has images."""
    return not isinstance(entry, str) and bool(_images(entry) or _image_parts(named, entry))


def _folder(named: TextSet) -> Path | None:
    return next((path for path in named.candidates() if path.is_dir()), None)


def _pictures(folder: Path) -> list[Path]:
    return sorted(path for path in folder.iterdir() if path.suffix.lower() in SUFFIXES and path.is_file())


def _samples(named: TextSet, shared: bool, apart: bool) -> tuple[list[Sample], str]:
    """Rows of a set, and their name in messages. If a part is held out (`shared`): that part (`apart`), or the rest."""
    folder = _folder(named)
    file = next((path for path in named.candidates() if path.is_file()), None)
    found = list(islice(_read(named, folder, file), MOST_ROWS))
    name = (
        f"the directory {folder.name}" if folder else f"the file {file.name}" if file else f"the data set {named.data}"
    )
    if not found:
        raise RequestError(
            named.at(
                "data", f"{name} has no rows with images, which the other sets have; give .jsonl, .parquet or images"
            )
        )
    if not shared:
        return found, name
    keys = [sample.keys for sample in found]
    alike = Counter(next(iter(own)) for own in keys)  # rows of one image stay together
    sides = dict(zip(alike, choose(list(alike.values()), 1 / 4), strict=True))
    held = [sides[next(iter(own))] for own in keys]
    shown = {key for own, is_out in zip(keys, held, strict=True) if is_out for key in own}
    out = [sample for sample, is_out in zip(found, held, strict=True) if is_out]
    rest = [sample for sample, own in zip(found, keys, strict=True) if not shown & own.keys()]
    if not out or not rest:
        text = f"{name} has no two rows without a common image, one of them to be held out; give more, or others in evaluate.data"
        raise RequestError(named.at("data", text))
    return (spread(out), f"the held-out part of {name}") if apart else (rest, f"{name} without its held-out part")


def _read(named: TextSet, folder: Path | None, file: Path | None) -> Iterator[Sample]:
    if folder is None:
        for entry, where in entries(named):
            row = {named.text_column: entry} if isinstance(entry, str) else entry
            yield Sample(named, row, None if file is None else file.parent, where)
        return
    for picture in _pictures(folder):
        written = picture.with_suffix(".txt")
        with reading(named, written, "; every image needs its text beside it"):
            text = written.read_text(encoding="utf-8-sig").rstrip("\r\n")
        yield Sample(named, {"image": picture.name, named.text_column: text}, folder, f"'{picture}'")
