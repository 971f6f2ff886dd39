"""A teacher's likeliest tokens for fixed rows, kept on disk: computed once, however many epochs, runs and drafts learn from them.

A directory of safetensors shards of some rows each (`ids` uint16 or int32 `[rows, s, k]`, `log_probs` float16 `[rows, s, k]`, `rest`
float32 `[rows, s]`) and `manifest.json`, which says of which teacher and rows they are. A shard is there whole or not at all, so that a
killed run goes on after its last whole one.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from compress.core.files import disk_errors, intact, seal, write_json, written_beside
from compress.distill.train.data import TextRows, Told, digest_of
from compress.distill.train.losses import SparseTargets
from compress.distill.train.teacher import Teacher
from runtime.checkpoint.checkpoint import read_json
from runtime.checkpoint.headers import read_header
from runtime.errors import ArtifactError, CompressError, RequestError

MANIFEST = "manifest.json"
VERSION = 1
SHARD_BYTES = 64 * 2**20
SPARE_BYTES = 64 * 2**20  # left free on the disk
SMALLEST = float(torch.finfo(torch.float16).min)


class TeacherCache:
    """What `cache_teacher` wrote.

    Attributes:
        directory: where it is.
        facts: the manifest.

    Raises:
        ArtifactError: it is damaged or not finished.
    """

    def __init__(self, directory: str | Path) -> None:
        self.directory = Path(directory)
        self.facts = read_json(self.directory / MANIFEST)
        if self.facts.get("version") != VERSION:
            raise ArtifactError(
                f"{self.directory / MANIFEST} is of version {self.facts.get('version')}, expected {VERSION}"
            )
        for number in range(shard_count(self.facts)):
            if not whole(self.directory, self.facts, number):
                raise ArtifactError(f"{self.directory} is not finished: {shard_file(number)} is missing or damaged")

    @property
    def nbytes(self) -> int:
        """Bytes on the disk."""
        return sum(file.stat().st_size for file in self.directory.glob("*.safetensors"))

    def targets(self, rows: torch.Tensor) -> SparseTargets:
        """Of rows int64 `[b]` by index: ids `[b, s, k]`, probabilities that add up to 1 with the rest's."""
        at_once = self.facts["shard_rows"]
        parts: list[dict[str, torch.Tensor]] = []
        for row in rows.tolist():
            if not 0 <= row < self.facts["rows"]:
                raise RequestError(f"row {row} is not in the teacher's cache of {self.facts['rows']} rows")
            with safe_open(self.directory / shard_file(row // at_once), framework="pt") as file:
                parts.append({name: file.get_slice(name)[row % at_once] for name in ("ids", "log_probs", "rest")})
        ids = torch.stack([part["ids"] for part in parts]).to(torch.int64)
        if not 0 <= int(ids.min()) <= int(ids.max()) < self.facts["vocabulary"]:
            raise ArtifactError(
                f"{self.directory} is damaged: it has ids outside the vocabulary of {self.facts['vocabulary']}"
            )
        log_probs = torch.stack([part["log_probs"] for part in parts]).float()
        rest = torch.stack([part["rest"] for part in parts])
        # float16 has rounded them one by one.
        total = torch.logsumexp(torch.cat([log_probs, rest[..., None].log()], -1), -1)
        return SparseTargets(ids, log_probs - total[..., None], rest * (-total).exp(), self.facts["temperature"])

    def check(self, rows: Any, vocabulary: int, kept: torch.Tensor | None) -> None:
        """RequestError unless this is a cache of these rows (a `TextRows`), for heads of this many tokens, these if trimmed."""
        wanted = {"vocabulary": vocabulary, "kept": kept_digest(kept)}
        if isinstance(rows, TextRows):
            wanted["sha256"] = digest_of(rows.ids)
        else:
            raise RequestError(
                "a teacher's cache holds fixed rows only; rows that the draft writes need a live teacher"
            )
        for key, value in wanted.items():
            if self.facts[key] != value:
                what = {"vocabulary": "another vocabulary", "kept": "other kept tokens", "sha256": "other rows"}[key]
                raise RequestError(f"the teacher's cache in {self.directory} is of {what} than those to be trained on")


def cache_teacher(
    teacher: Teacher,
    rows: TextRows,
    directory: str | Path,
    *,
    k: int = 64,
    temperature: float = 1.0,
    kept: torch.Tensor | None = None,
    batch: int = 8,
    shard_rows: int | None = None,
    max_bytes: int | None = None,
    told: Told | None = None,
) -> TeacherCache:
    """Write the teacher's `k` likeliest tokens at every position of the rows, or what of it is missing.

    Args:
        teacher: one with a fingerprint.
        rows: `[n, s]`.
        directory: new, empty, or of an earlier run with the same arguments.
        k: at most the vocabulary.
        temperature: that logits are divided by, above 0.
        kept: int `[v]`: a trimmed draft's tokens (`vocab_trim`); distributions are then over these alone, ids their indices.
        batch: rows in a forward pass of the teacher.
        shard_rows: rows of a file; None: as many as make 64 MiB.
        max_bytes: the cache may be so large; None: only the disk is a limit.
        told: is called with rows done and rows in all.

    Raises:
        RequestError: values out of range, a size over `max_bytes`, a directory with something else in it.
        CompressError: the disk has no room for it; nothing was written.
    """
    directory = Path(directory)
    facts = _facts(teacher, rows, k, temperature, kept, shard_rows)
    begun = intact(directory / MANIFEST)
    if not begun and (directory / MANIFEST).is_file():  # damaged: nothing says any more whose numbers the rest are
        for pattern in (f"{MANIFEST}*", "shard-*.safetensors*"):
            for file in directory.glob(pattern):
                file.unlink()
    if begun and (found := read_json(directory / MANIFEST)) != facts:
        odd = next(key for key in {**facts, **found} if facts.get(key) != found.get(key))
        raise RequestError(
            f"{directory} is a cache of another teacher or of other rows ({odd} is {found.get(odd)!r}, not {facts.get(odd)!r}); "
            "remove it or choose another directory"
        )
    if not begun and directory.is_dir() and any(directory.iterdir()):
        raise RequestError(f"{directory} is not empty and holds no teacher's cache; choose another directory")
    missing = [
        n
        for n in range(shard_count(facts))
        if not (begun and whole(directory, facts, n) and intact(directory / shard_file(n)))
    ]
    _check_room(directory, facts, missing, max_bytes)
    directory.mkdir(parents=True, exist_ok=True)
    with disk_errors(f"writing {directory}"):
        write_json(directory / MANIFEST, facts)
        seal(directory / MANIFEST)
        for number in missing:
            start = number * facts["shard_rows"]
            ids = rows.ids[start : start + facts["shard_rows"]]
            tensors = _shard(teacher, ids, facts, kept, batch)
            with written_beside(directory / shard_file(number)) as temporary:
                save_file(tensors, temporary)
            seal(directory / shard_file(number))
            if told is not None:
                told(start + len(ids), len(rows))
    return TeacherCache(directory)


def cache_bytes(rows: int, length: int, k: int, vocabulary: int) -> int:
    """What a cache takes on the disk, headers aside."""
    return rows * length * (k * (_id_dtype(vocabulary).itemsize + 2) + 4)


def shard_file(number: int) -> str:
    return f"shard-{number:05d}.safetensors"


def shard_count(facts: dict[str, Any]) -> int:
    return -(-facts["rows"] // facts["shard_rows"])


def whole(directory: Path, facts: dict[str, Any], number: int) -> bool:
    """Whether this shard is there with the right tensors."""
    file = directory / shard_file(number)
    if not file.is_file():
        return False
    try:
        header = read_header(file)
    except ArtifactError:
        return False
    count = min(facts["shard_rows"], facts["rows"] - number * facts["shard_rows"])
    shape = (count, facts["length"])
    expected = {
        "ids": ((*shape, facts["k"]), _id_dtype(facts["vocabulary"])),
        "log_probs": ((*shape, facts["k"]), torch.float16),
        "rest": (shape, torch.float32),
    }
    return {name: (entry.shape, entry.dtype) for name, entry in header.tensors.items()} == expected


def kept_digest(kept: torch.Tensor | None) -> str:
    """SHA-256 (hex) of a trimmed vocabulary; empty: it is whole."""
    return "" if kept is None else digest_of(kept.to(torch.int64))


def _facts(
    teacher: Teacher, rows: TextRows, k: int, temperature: float, kept: torch.Tensor | None, shard_rows: int | None
) -> dict[str, Any]:
    if not teacher.fingerprint:
        raise RequestError(
            "a teacher without a fingerprint cannot be cached: nothing would say whose numbers these are"
        )
    vocabulary = teacher.vocabulary if kept is None else len(kept)
    if not 1 <= k <= vocabulary:
        raise RequestError(f"a teacher's k likeliest tokens: k must be 1 to {vocabulary}, its vocabulary, not {k}")
    if temperature <= 0:
        raise RequestError(f"the temperature of a teacher's cache must be above 0, not {temperature}")
    length = rows.ids.shape[1]
    if shard_rows is None:
        shard_rows = max(1, SHARD_BYTES // cache_bytes(1, length, k, vocabulary))
    if shard_rows < 1:
        raise RequestError(f"shard_rows must be at least 1, not {shard_rows}")
    return {
        "version": VERSION, "teacher": teacher.fingerprint, "sha256": digest_of(rows.ids), "rows": len(rows), "length": length,
        "vocabulary": vocabulary, "kept": kept_digest(kept), "k": k, "temperature": float(temperature),
        "shard_rows": min(shard_rows, len(rows)),
    }  # fmt: skip


def _check_room(directory: Path, facts: dict[str, Any], missing: list[int], max_bytes: int | None) -> None:
    size = cache_bytes(facts["rows"], facts["length"], facts["k"], facts["vocabulary"])
    if max_bytes is not None and size > max_bytes:
        raise RequestError(
            f"the teacher's cache would take {size / 1e6:.1f} MB, more than the {max_bytes / 1e6:.1f} MB allowed; "
            f"lower k ({facts['k']}) or the number of rows ({facts['rows']})"
        )
    place = next(path for path in (directory, *directory.absolute().parents) if path.is_dir())
    free = shutil.disk_usage(place).free
    needed = size * len(missing) // max(1, shard_count(facts))
    if needed + SPARE_BYTES > free:
        raise CompressError(
            f"the teacher's cache needs {needed / 1e6:.1f} MB in {directory}, where {free / 1e6:.1f} MB are free"
        )


def _shard(
    teacher: Teacher, ids: torch.Tensor, facts: dict[str, Any], kept: torch.Tensor | None, batch: int
) -> dict[str, torch.Tensor]:
    parts = []
    for rows in ids.split(max(1, batch)):
        logits = teacher.logits(rows.to(teacher.device))
        if kept is not None:
            logits = logits[..., kept.to(logits.device, torch.int64)]
        parts.append(SparseTargets.of(logits, facts["k"], facts["temperature"]).to(torch.device("cpu")))
    return {
        "ids": torch.cat([part.ids for part in parts]).to(_id_dtype(facts["vocabulary"])),
        "log_probs": torch.cat([part.log_probs for part in parts]).clamp_min(SMALLEST).to(torch.float16),
        "rest": torch.cat([part.rest for part in parts]).float(),
    }


def _id_dtype(vocabulary: int) -> torch.dtype:
    return torch.uint16 if vocabulary <= 2**16 else torch.int32
