"""The bundled texts: documents of the Python standard library, in splits that share nothing, and their tokens.

Everything is read from the running interpreter: the sources of its standard library and the prose of
``pydoc_data.topics``.  Generated tables and repeated text are dropped, and whole documents are assigned to the held-out,
calibration and training splits by a hash of their names.
"""

from __future__ import annotations

import hashlib
import re
import sys
import sysconfig
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

TEXT_DIR = Path(__file__).resolve().parent / "texts"
EOS = "<|endoftext|>"
SEPARATOR = f"\n{EOS}\n"

#: Bytes wanted in each bundled text, by stratum (library code, test code, prose).
HELDOUT_BYTES = {"lib": 125_000, "test": 75_000, "prose": 50_000}
CALIBRATION_BYTES = {"lib": 200_000, "test": 120_000, "prose": 80_000}
MAX_BUNDLED_DOCUMENT = 40_000
OVERLAP_WINDOW = 120

SKIPPED_DIRS = {
    "__pycache__",
    "encodings",
    "ensurepip",
    "idlelib",
    "lib-dynload",
    "lib2to3",
    "pydoc_data",
    "site-packages",
    "cjkencodings",
    "encoded_modules",
    "data",
}
SKIPPED_FILES = {"html/entities.py", "stringprep.py", "_osx_support.py", "this.py", "__phello__.foo.py"}


@dataclass
class Document:
    """One source file or documentation topic."""

    name: str
    stratum: str
    text: str

    @property
    def key(self) -> str:
        """A hash of the name, which decides the order in which documents are assigned to splits."""
        return hashlib.sha256(self.name.encode()).hexdigest()


def clean(text: str) -> str:
    """Normalise line ends, drop form feeds, trailing blanks and runs of blank lines."""
    text = text.replace("\r\n", "\n").replace("\r", "\n").replace("\f", "").replace("\ufeff", "")
    text = re.sub(r"[ \t]+\n", "\n", text)
    return re.sub(r"\n{4,}", "\n\n\n", text).strip("\n") + "\n"


def is_natural(text: str) -> bool:
    """Whether a text is mostly code or prose rather than a table, and free of control characters."""
    if len(text) < 400:
        return False
    if any((ord(char) < 32 and char not in "\n\t") or 127 <= ord(char) < 160 or char == "\ufffd" for char in text):
        return False
    if sum(ord(char) > 127 for char in text) > 0.002 * len(text):
        return False
    digits = sum(char.isdigit() for char in text) / len(text)
    words = sum(char.isalpha() or char.isspace() for char in text) / len(text)
    longest = max(map(len, text.splitlines()))
    return digits < 0.08 and words > 0.68 and longest < 400


def collect() -> list[Document]:
    """Return the usable documents of the running interpreter's standard library, sorted by name."""
    root = Path(sysconfig.get_paths()["stdlib"])
    documents = []
    for path in sorted(root.rglob("*.py")):
        parts = path.relative_to(root).parts
        name = "/".join(parts)
        generated = name.startswith(("_sysconfigdata", "config-")) or name in SKIPPED_FILES
        if generated or SKIPPED_DIRS.intersection(parts[:-1]) or "bad_coding" in name or "badsyntax" in name:
            continue
        try:
            text = clean(path.read_text(encoding="utf-8"))
        except (UnicodeDecodeError, OSError):
            continue
        if EOS not in text and is_natural(text):
            is_test = bool({"test", "tests"}.intersection(parts[:-1]))
            documents.append(Document(name, "test" if is_test else "lib", text))
    from pydoc_data.topics import topics

    for topic, text in sorted(topics.items()):
        text = clean(text)
        if is_natural(text):
            documents.append(Document(f"topic/{topic}", "prose", text))
    return sorted(documents, key=lambda document: document.name)


def blocks_of(text: str) -> list[str]:
    """Split a text into blocks that end with blank lines; joining the blocks gives the text back."""
    return re.findall(r"(?:[^\n]*\n)+?(?:\n+|\Z)", text) if text else []


def drop_repeated_blocks(documents: list[Document], min_length: int = 160) -> list[Document]:
    """Remove blocks of some length which already occurred (up to whitespace) in an earlier document."""
    seen: set[str] = set()
    kept = []
    for document in documents:
        out = []
        for block in blocks_of(document.text):
            normal = " ".join(block.split())
            if len(normal) >= min_length:
                if normal in seen:
                    continue
                seen.add(normal)
            out.append(block)
        text = clean("".join(out))
        if is_natural(text):
            kept.append(Document(document.name, document.stratum, text))
    return kept


def window_hashes(text: str, width: int) -> np.ndarray:
    """Return a 64-bit polynomial hash of every ``width``-character window of ``text``, in order."""
    codes = np.frombuffer(text.encode("utf-32-le"), dtype=np.uint32).astype(np.uint64) + np.uint64(1)
    count = len(codes) - width + 1
    if count <= 0:
        return np.zeros(0, dtype=np.uint64)
    hashes = np.zeros(count, dtype=np.uint64)
    multiplier = np.uint64(0x9E3779B97F4A7C15)
    for offset in range(width):
        hashes = hashes * multiplier + codes[offset : offset + count]
    return hashes


def remove_overlap(text: str, reference: np.ndarray, width: int = OVERLAP_WINDOW) -> str:
    """Drop every block of ``text`` that shares a ``width``-character window with the sorted hashes ``reference``."""
    while True:
        hashes = window_hashes(text, width)
        if not len(hashes):
            return text
        position = np.minimum(np.searchsorted(reference, hashes), len(reference) - 1)
        hits = np.flatnonzero(reference[position] == hashes)
        if not len(hits):
            return text
        covered = np.zeros(len(text) + 1, dtype=np.int64)
        np.add.at(covered, hits, 1)
        np.add.at(covered, hits + width, -1)
        flags = np.cumsum(covered) > 0
        out, start = [], 0
        for block in blocks_of(text):
            end = start + len(block)
            if not flags[start:end].any():
                out.append(block)
            start = end
        text = clean("".join(out)) if out else ""


def take(pool: list[Document], wanted: dict[str, int]) -> tuple[list[Document], list[Document]]:
    """Take whole documents from ``pool`` (in hash order) until each stratum has its bytes; return (taken, rest)."""
    missing = dict(wanted)
    taken, rest = [], []
    for document in pool:
        size = len(document.text.encode())
        if size <= min(MAX_BUNDLED_DOCUMENT, missing[document.stratum] + 4_000):
            missing[document.stratum] -= size
            taken.append(document)
        else:
            rest.append(document)
    return taken, rest


def join(documents: list[Document]) -> str:
    """Concatenate documents, an end-of-text line after each."""
    return "".join(document.text.rstrip("\n") + SEPARATOR for document in documents)


def without_overlap(documents: list[Document], reference: str) -> list[Document]:
    """Remove from ``documents`` what ``reference`` also contains."""
    hashes = np.unique(window_hashes(reference, OVERLAP_WINDOW))
    out = []
    for document in documents:
        text = remove_overlap(document.text, hashes)
        if is_natural(text):
            out.append(Document(document.name, document.stratum, text))
    return out


def build_texts() -> dict[str, str]:
    """Return the texts of the three splits: ``heldout``, ``calibration`` and ``train``."""
    pool = sorted(drop_repeated_blocks(collect()), key=lambda document: document.key)
    heldout, pool = take(pool, HELDOUT_BYTES)
    pool = without_overlap(pool, join(heldout))
    calibration, pool = take(pool, CALIBRATION_BYTES)
    train = without_overlap(pool, join(calibration))
    splits = {"heldout": heldout, "calibration": calibration, "train": train}
    for name, documents in splits.items():
        sizes = dict.fromkeys(HELDOUT_BYTES, 0)
        for document in documents:
            sizes[document.stratum] += len(document.text.encode())
        print(f"{name}: {len(documents)} documents, {sum(sizes.values())} bytes {sizes}", file=sys.stderr)
    return {name: join(documents) for name, documents in splits.items()}


def encode_text(tokenizer: Any, text: str) -> np.ndarray:
    """Return the token ids of ``text``, int64 ``[n]``; each document is encoded by itself."""
    pieces = [piece for piece in re.split(f"(?<={re.escape(EOS)})", text) if piece]
    encodings = tokenizer.backend_tokenizer.encode_batch(pieces, add_special_tokens=False)
    return np.concatenate([np.array(encoding.ids, dtype=np.int64) for encoding in encodings])
