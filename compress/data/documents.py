"""Documents of a text, read lazily: bundled texts, .txt, .jsonl and .parquet files, data sets of the hub; as text or conversations."""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from compress.core import resources
from compress.data.chat import COLUMNS, render
from compress.data.tokens import end_of_text
from compress.recipe.models import BUNDLED, TextSet
from compress.recipe.origin import nearest_path
from runtime.config.messages import did_you_mean, listing
from runtime.errors import RequestError, first_line

MAX_TEXT_BYTES = 64 * 2**20
"""Bytes of a .txt file that are read; more text does not improve calibration."""

_DATASET_ID = re.compile(r"[\w.-]{1,96}(/[\w.-]{1,96})?\Z")


def documents(source: TextSet, bundled: str, tokenizer: Any, split_paragraphs: bool) -> tuple[Iterator[str], str]:
    """The documents of `source` and a description of where they come from.

    Args:
        source: of the `calibration` or `evaluate` section.
        bundled: which bundled text `data: bundled` means (`calibration` or `heldout`).
        tokenizer: the model's. Its end-of-text token, written out in a .txt file, ends a document; its chat template renders
            conversations (`Conversation`).
        split_paragraphs: without such marks, a blank line ends a document (else the whole .txt file is one).

    Raises:
        RequestError: no such file or data set, a missing column, text that cannot be decoded; on iteration too.
    """
    if source.data == BUNDLED:
        path = resources.bundled_text(bundled)
        where = f"the bundled {bundled.replace('heldout', 'held-out')} text"
        return _text(source, path, tokenizer, split_paragraphs), where
    file = _find(source)
    if file is not None:
        reader = READERS.get(file.suffix.lower())
        if reader is None:
            raise RequestError(source.at("data", f"'{file}' has an unsupported file type; allowed: {listing(READERS)}"))
        return reader(source, file, tokenizer, split_paragraphs), f"the file {file.name}"
    return _dataset(source, tokenizer), f"the data set {source.data}"


def _find(source: TextSet) -> Path | None:
    """The file that `data` names; None when it can only be a data set."""
    tried = source.candidates()
    for path in tried:
        if path.is_file():
            return path
    if any(path.is_dir() for path in tried):
        raise RequestError(source.at("data", f"'{source.data}' is a directory; give one file ({listing(READERS)})"))
    if tried[0].suffix.lower() not in READERS and _DATASET_ID.match(source.data):
        return None
    meant = nearest_path(tried, lambda entry: entry.suffix.lower() in READERS)
    if meant is not None:
        raise RequestError(source.at("data", f"no file '{source.data}'; did you mean '{meant}'?"))
    where = " and ".join(dict.fromkeys(str(path) for path in tried))
    raise RequestError(
        source.at("data", f"no file '{source.data}' (tried {where}); 'bundled' is the text of this package")
    )


@contextmanager
def reading(source: TextSet, path: Path, advice: str = "") -> Iterator[None]:
    """RequestError in place of errors of a file that cannot be read or is not UTF-8 text."""
    try:
        yield
    except OSError as error:
        raise RequestError(source.at("data", f"'{path}' cannot be read: {error.strerror}{advice}")) from None
    except UnicodeDecodeError as error:
        raise RequestError(source.at("data", f"'{path}' is not UTF-8 text (byte {error.start})")) from None


def _text(source: TextSet, path: Path, tokenizer: Any, split_paragraphs: bool) -> Iterator[str]:
    with reading(source, path), path.open("rb") as file:
        raw = file.read(MAX_TEXT_BYTES)
        whole = not file.read(1)  # else the limit may cut a character in two, and its first bytes are dropped
        text = codecs.getincrementaldecoder("utf-8-sig")().decode(raw, final=whole)
    mark = end_of_text(tokenizer)
    if mark and mark in text:
        yield from (part.strip("\n") for part in text.split(mark))
    elif split_paragraphs:
        yield from re.split(r"\n\s*\n", text)
    else:
        yield text


def entries(source: TextSet) -> Iterator[tuple[Mapping[str, Any] | str, str]]:
    """Rows of a .jsonl or .parquet file, or of a data set, with all their columns, and where each is; none of other files.

    Raises:
        RequestError: as `documents`.
    """
    file = _find(source)
    if file is None:
        return _dataset_rows(source)
    kinds = {".jsonl": _json_rows, ".parquet": _parquet_rows}
    return kinds[file.suffix.lower()](source, file) if file.suffix.lower() in kinds else iter(())


def _jsonl(source: TextSet, path: Path, tokenizer: Any, split_paragraphs: bool) -> Iterator[str]:
    for entry, where in _json_rows(source, path):
        yield entry if isinstance(entry, str) else _column(source, entry, where, tokenizer)


def _json_rows(source: TextSet, path: Path) -> Iterator[tuple[Mapping[str, Any] | str, str]]:
    with reading(source, path), path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if line.strip():
                where = f"'{path}' line {number}"
                yield _json_entry(source, line.decode("utf-8-sig"), where), where


def _json_entry(source: TextSet, line: str, where: str) -> Mapping[str, Any] | str:
    try:
        entry = json.loads(line)
    except (ValueError, RecursionError) as error:
        reason = error.msg if isinstance(error, json.JSONDecodeError) else "nested too deeply"
        raise RequestError(source.at("data", f"{where} is not JSON: {reason}")) from None
    if not isinstance(entry, (str, dict)):
        raise RequestError(source.at("data", f"{where} is neither an object nor a text"))
    return entry


def _parquet(source: TextSet, path: Path, tokenizer: Any, split_paragraphs: bool) -> Iterator[str]:
    for row, where in _parquet_rows(source, path, whole=False):
        yield _column(source, row, where, tokenizer)


def _parquet_rows(source: TextSet, path: Path, whole: bool = True) -> Iterator[tuple[Mapping[str, Any], str]]:
    """Rows with all columns (`whole`), or only those that text needs."""
    import pyarrow
    import pyarrow.parquet

    try:
        file = pyarrow.parquet.ParquetFile(path)
        names, columns, size = file.schema_arrow.names, None, 16
        if not whole:
            chosen = {column_of(source, names, f"'{path}'"), *(name for name in names if name == "tools")}
            columns, size = sorted(chosen), 256
        batches = file.iter_batches(batch_size=size, columns=columns)
        for number, row in enumerate((row for batch in batches for row in batch.to_pylist()), 1):
            yield row, f"'{path}' row {number}"
    except (pyarrow.ArrowException, OSError) as error:
        raise RequestError(source.at("data", f"'{path}' is not a readable Parquet file: {first_line(error)}")) from None


def _dataset(source: TextSet, tokenizer: Any) -> Iterator[str]:
    for row, where in _dataset_rows(source):
        yield _column(source, row, where, tokenizer)


def _dataset_rows(source: TextSet) -> Iterator[tuple[Mapping[str, Any], str]]:
    import datasets

    try:
        rows = datasets.load_dataset(source.data, source.subset, split=source.split, streaming=True)
        for number, row in enumerate(rows, 1):
            yield row, f"row {number} of the data set '{source.data}'"
    except RequestError:
        raise
    except Exception as error:
        # `datasets` lets errors of a dozen libraries through (network, archive, schema); all mean: it cannot be read.
        text = f"'{source.data}' is neither a file here nor a data set that can be read: {first_line(error)}"
        raise RequestError(source.at("data", text)) from None


def _column(source: TextSet, row: Mapping[str, Any], where: str, tokenizer: Any) -> str:
    """The text of a row."""
    column = column_of(source, row, where)
    value = row[column]
    if isinstance(value, list):
        return render(source, value, row.get("tools"), where, tokenizer)
    if not isinstance(value, str):
        text = f"{where} has {type(value).__name__} under '{column}' where a text, or a list of messages, is expected"
        raise RequestError(source.at("text_column", text))
    return value


def column_of(source: TextSet, names: Collection[str], where: str) -> str:
    """The name of the column that holds the text, or the conversation."""
    if (
        source.text_column == "text"
        and "text" not in names
        and (column := next((c for c in COLUMNS if c in names), None))
    ):
        return column
    if source.text_column not in names:
        hint = did_you_mean(source.text_column, names) or "."
        text = f"{where} has no column '{source.text_column}'{hint} Columns: {listing(names) or 'none'}"
        raise RequestError(source.at("text_column", text))
    return source.text_column


READERS: dict[str, Callable[[TextSet, Path, Any, bool], Iterator[str]]] = {
    ".txt": _text,
    ".jsonl": _jsonl,
    ".parquet": _parquet,
}
