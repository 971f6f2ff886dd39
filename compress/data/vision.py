"""Images with text for the calibration and evaluation of vision-language models, as the checkpoint's own processor reads them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch.nn.utils.rnn import pad_sequence

from compress.data.documents import entries, reading
from compress.data.held_out import choose
from compress.data.images import SUFFIXES, load_processor, open_image
from compress.data.layout import ImageRows
from compress.data.rows import CalibrationData, EvaluationData, TextReader, digest, draw, hashed
from compress.data.speech_rows import NOTHING
from compress.data.tokens import check_vocabulary
from compress.recipe.models import BUNDLED, CalibrationConfig, EvaluateConfig, TextSet, TextSource
from runtime.errors import RequestError, first_line

MOST_ROWS = 2048
"""Rows of a set that are read: they hold images, and a few hundred are enough."""

_COLUMNS = ("images", "image")
_PEEK = 16  # rows that show whether a set has images


def has_images(source: TextSet) -> bool:
    """Whether a section names images with text: a directory of images, or rows the first of which have some.

    Raises:
        RequestError: as `compress.data.documents`.
    """
    if source.data == BUNDLED:
        return False
    folder = _folder(source)
    if folder is not None:
        return any(_pictures(folder))
    return any(_shows(entry) for entry, _ in islice(entries(source), _PEEK))


@dataclass(frozen=True)
class Sample:
    """A row of a set.

    Attributes:
        entry: its columns. folder: that paths in it are relative to. where: what messages call it.
    """

    entry: Mapping[str, Any]
    folder: Path | None
    where: str


@dataclass(frozen=True)
class ImageReader(TextReader):
    """How a vision-language model reads images with text, and text alone as any other model does. Attributes as `TextReader`'s, and

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
        if not has_images(config.text):
            return super().calibration(config)
        samples, where = self._samples(config.text, config.shared, False)
        chosen = [samples[i] for i in draw(torch.arange(len(samples)), config).tolist()]
        rows = sorted((self._row(config, sample) for sample in chosen), key=len)
        batches = []
        for start in range(0, len(rows), config.batch_size):
            ids = _together(rows[start : start + config.batch_size])
            batches.append((ids, ids != NOTHING))
        tokens = sum(map(len, rows))
        warning = ""
        if len(samples) < config.samples:
            warning = config.at("samples", f"{where} has only {len(samples)} rows; {config.samples} were asked for")
        description = f"{len(rows)} rows of images with text from {where}, seed {config.seed} ({tokens:,} tokens)"
        return CalibrationData(batches, tokens, len(rows), description, "named", digest(batches), warning)

    def evaluation(self, config: EvaluateConfig, calibration: CalibrationConfig) -> EvaluationData:
        """The first rows, `samples` of them at most. Text alone: as `TextReader`.

        Raises:
            RequestError: as `calibration`.
        """
        source: TextSource = calibration if calibration.shared else config
        if not has_images(source.text):
            return super().evaluation(config, calibration)
        samples, where = self._samples(source.text, calibration.shared, True)
        rows = [self._row(source, sample) for sample in samples[: config.samples]]
        ids = _together(rows)
        kind = "held out" if calibration.shared else "named"
        described = f"{where}, {len(rows)} rows of images with text"
        return EvaluationData(ids, len(rows), sum(map(len, rows)), described, kind, hashed(ids))

    def warnings(self, config: CalibrationConfig) -> list[str]:
        """That the model sees no images, where the set has none."""
        if has_images(config.text):
            return []
        text = "the model reads images too, and its layers are calibrated on text alone; give rows with images (docs/models.md)"
        return [config.at("data", text)]

    # ---------------------------------------------------------------- rows
    @cached_property
    def processor(self) -> Any:
        """transformers' processor of the checkpoint; RequestError where it has none, or one that says nothing of images."""
        found = load_processor(self.path, self.config)
        if found is None or self.layout.placeholder is None:
            what = "processor (preprocessor_config.json)" if found is None else "image_token_id in config.json"
            raise RequestError(f"{self.path} has no {what} to read images with; add it, or give text without images")
        return found

    def _samples(self, source: TextSet, shared: bool, apart: bool) -> tuple[list[Sample], str]:
        """Rows of a set, where a part is held out (`shared`) those of this part (`apart`) or the others; and what they are called."""
        folder = _folder(source)
        found = list(islice(_samples(source, folder), MOST_ROWS))
        name = source.data if folder is None else folder.name
        if not shared:
            return found, name
        if len(found) < 2:
            text = f"'{source.data}' has one row, and one more is needed to be held out; give more, or others in evaluate.data"
            raise RequestError(source.at("data", text))
        out = choose([1] * len(found), 1 / 4)
        kept = [sample for sample, held in zip(found, out, strict=True) if held is apart]
        return kept, f"the held-out part of {name}" if apart else f"{name} without its held-out part"

    def _row(self, source: TextSource, sample: Sample) -> torch.Tensor:
        """Of a sample, int64 `[n]`, no longer than the section's `sequence_length`."""

        def features() -> Mapping[str, torch.Tensor]:
            try:
                return self._features(sample)
            except RequestError as error:
                raise RequestError(source.at("data", str(error))) from None

        row = self.layout.pack(features)
        check_vocabulary(row[row >= 0], self.vocab_size, source.text, sample.where)
        length = source.sequence_length
        if bool((row[length:] < 0).any()):
            text = f"{sample.where} has {len(row)} tokens, those of images included, which are not cut; raise it, or make images smaller"
            raise RequestError(source.at("sequence_length", text))
        if len(row) < 2:
            raise RequestError(source.at("data", f"{sample.where} holds no text"))
        return row[:length]

    def _features(self, sample: Sample) -> dict[str, torch.Tensor]:
        """What the processor gives for it."""
        processor, where = self.processor, sample.where
        text, named, rendered = self._text(sample)
        images = [open_image(value, sample.folder, where) for value in named]
        mark = getattr(processor, "image_token", None)
        if mark and not rendered and (count := text.count(mark)) != len(images):
            raise RequestError(f"{where} has {len(images)} images and {count} places for them ({mark}) in its text")
        tokenizer = self.tokenizer()
        # A chat template writes what a text begins with.
        marked = rendered and tokenizer.bos_token and text.startswith(tokenizer.bos_token)
        options = {"add_special_tokens": False} if marked else {}
        try:
            found = processor(text=[text], images=images or None, return_tensors="pt", **options)
        except Exception as error:  # each processor has checks of its own
            reason = f"the processor of {self.path} cannot read {where} ({len(images)} images): {first_line(error)}"
            raise RequestError(reason) from None
        if images and not bool((found["input_ids"] == self.layout.placeholder).any()):
            raise RequestError(
                f"{where}: the processor of {self.path} puts no token {self.layout.placeholder} in the place of images"
            )
        return {name: value for name, value in found.items() if isinstance(value, torch.Tensor)}

    def _text(self, sample: Sample) -> tuple[str, list[Any], bool]:
        """The text of a row as its processor reads it, its images in order, and whether the chat template has written the text."""
        entry, where, mark = sample.entry, sample.where, getattr(self.processor, "image_token", None)
        images = _images(entry)
        messages = entry.get("messages")
        if messages is None:
            text = entry.get("text")
            if not isinstance(text, str):
                raise RequestError(f"{where} has neither a text under 'text' nor 'messages' beside its images")
            if not images or (mark and mark in text):
                return text, images, False
            if not self._template:
                return "".join([mark or ""] * len(images)) + text, images, False
            messages = [{"role": "user", "content": text}]
        elif not self._template:
            raise RequestError(
                f"{where} has messages, and {self.path} has no chat template; give 'text' in their place"
            )
        messages, placed = _conversation(messages, images, mark, where)
        try:
            return self.processor.apply_chat_template(messages, tokenize=False), placed, True
        except Exception as error:  # templates are programs
            raise RequestError(f"the chat template of {self.path} cannot write {where}: {first_line(error)}") from None

    @property
    def _template(self) -> bool:
        return bool(getattr(self.processor, "chat_template", None))


def _conversation(
    messages: Any, images: Sequence[Any], mark: str | None, where: str
) -> tuple[list[dict[str, Any]], list[Any]]:
    """Messages whose contents are lists of parts, and the images in the order of their parts.

    An image part names its image, or stands for the next one of the row's. Images of the row that have no part come first in the first
    message of a user, unless the text has places for them.
    """
    if not isinstance(messages, Sequence) or isinstance(messages, str) or not messages:
        raise RequestError(
            f"{where} has {type(messages).__name__} under 'messages' where a list of messages is expected"
        )
    left, placed, found = list(images), list[Any](), list[dict[str, Any]]()
    for message in messages:
        content = message.get("content") if isinstance(message, Mapping) else None
        if not isinstance(content, (str, Sequence)) or not isinstance(message.get("role"), str):
            raise RequestError(f"{where} has a message without 'role' and 'content'")
        parts: list[dict[str, Any]] = []
        for part in [{"type": "text", "text": content}] if isinstance(content, str) else content:
            kind = part.get("type") if isinstance(part, Mapping) else None
            if kind == "text" and isinstance(part.get("text"), str):
                parts.append({"type": "text", "text": part["text"]})
            elif kind == "image":
                own = next((part[name] for name in ("image", "path", "url") if part.get(name)), None)
                if own is None and not left:
                    raise RequestError(f"{where} has more image parts than images ({len(images)})")
                placed.append(left.pop(0) if own is None else own)
                parts.append({"type": "image"})
            else:
                raise RequestError(f"{where} has a part of type {kind!r}; 'text' and 'image' are read")
        found.append({"role": message["role"], "content": parts})
    written = [part["text"] for message in found for part in message["content"] if part["type"] == "text"]
    if left and placed:
        raise RequestError(f"{where} has {len(left)} more images than image parts")
    if left and not (mark and any(mark in text for text in written)):
        first = next((message for message in found if message["role"] == "user"), found[0])
        first["content"][:0] = [{"type": "image"}] * len(left)
    return found, [*placed, *left]


def _together(rows: Sequence[torch.Tensor]) -> torch.Tensor:
    return pad_sequence(list(rows), batch_first=True, padding_value=NOTHING)


def _images(entry: Mapping[str, Any]) -> list[Any]:
    """Images that a row names beside its text."""
    value = next((entry[name] for name in _COLUMNS if entry.get(name) is not None), [])
    return list(value) if isinstance(value, (list, tuple)) else [value]


def _shows(entry: Mapping[str, Any] | str) -> bool:
    """Whether a row has images."""
    if isinstance(entry, str):
        return False
    messages = entry.get("messages")
    parts: Iterator[Any] = (
        part
        for message in (messages if isinstance(messages, (list, tuple)) else ())
        if isinstance(message, Mapping) and isinstance(message.get("content"), (list, tuple))
        for part in message["content"]
    )
    return bool(_images(entry)) or any(isinstance(part, Mapping) and part.get("type") == "image" for part in parts)


def _folder(source: TextSet) -> Path | None:
    return next((path for path in source.candidates() if path.is_dir()), None)


def _pictures(folder: Path) -> list[Path]:
    return sorted(path for path in folder.iterdir() if path.suffix.lower() in SUFFIXES and path.is_file())


def _samples(source: TextSet, folder: Path | None) -> Iterator[Sample]:
    if folder is None:
        file = next((path for path in source.candidates() if path.is_file()), None)
        for entry, where in entries(source):
            if isinstance(entry, str):
                entry = {"text": entry}
            if source.text_column != "text" and source.text_column in entry:
                entry = {**entry, "text": entry[source.text_column]}
            yield Sample(entry, None if file is None else file.parent, where)
        return
    for picture in _pictures(folder):
        written = picture.with_suffix(".txt")
        with reading(source, written, "; every image needs its text beside it"):
            text = written.read_text(encoding="utf-8-sig").rstrip("\r\n")
        yield Sample({"image": picture.name, "text": text}, folder, f"'{picture}'")
