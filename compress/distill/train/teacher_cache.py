"""Teacher outputs of fixed rows on disk: computed once, however many epochs, runs and students learn from them.

A directory of safetensors shards of some rows each and `manifest.json`, which says of which teacher and rows they are. What a teacher says
next is stored as its likeliest tokens: `ids` uint16 or int32 `[rows, s, k]`, `log_probs` float16 `[rows, s, k]`, `rest` float32
`[rows, s]`. Recovery adds hidden states. A shard is there whole or not at all, so that a killed run goes on after its last whole one.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from compress.core.files import disk_errors, intact, seal, write_json, written_beside
from compress.distill.train.data import Batch, TextRows, Told, digest_of
from compress.distill.train.losses import SparseTargets
from compress.distill.train.teacher import Teacher
from runtime.checkpoint.checkpoint import read_json
from runtime.errors import CompressError, RequestError

MANIFEST = "manifest.json"
SHARD_BYTES = 64 * 2**20  # at most
SPARE_BYTES = 64 * 2**20  # left free on the disk
SMALLEST = float(torch.finfo(torch.float16).min)
Tensors = dict[str, torch.Tensor]


class TeacherCache:
    """Outputs that `fill` has written.

    Attributes:
        directory: where they are.
        facts: the manifest: "rows", "shard_rows", "temperature", and what decides the outputs.
        first: the row that is row 0 of batches.
    """

    def __init__(self, directory: Path, first: int = 0) -> None:
        self.directory, self.first = directory, first
        self.facts: dict[str, Any] = read_json(directory / MANIFEST)

    @classmethod
    def fill(
        cls,
        directory: Path,
        facts: dict[str, Any],
        nbytes: int,
        shards: Callable[[list[int]], Iterable[tuple[int, Tensors]]],
        advice: str = "",
    ) -> TeacherCache:
        """Write what is missing of a cache; what a directory has of another teacher or of other rows is removed.

        Args:
            facts: of the manifest.
            nbytes: what the whole takes on the disk, about.
            shards: gives number and tensors of each shard whose number it is given.
            advice: what to do where the disk has no room.

        Raises:
            CompressError: the disk has no room; nothing was written.
        """
        begun = intact(directory / MANIFEST) and read_json(directory / MANIFEST) == facts
        if not begun:
            shutil.rmtree(directory, ignore_errors=True)
        count = -(-facts["rows"] // facts["shard_rows"])
        missing = [number for number in range(count) if not intact(directory / shard_file(number))]
        if missing:
            place = next(path for path in (directory, *directory.absolute().parents) if path.is_dir())
            free, needed = shutil.disk_usage(place).free, nbytes * len(missing) // count
            if needed + SPARE_BYTES > free:
                raise CompressError(
                    f"the teacher's outputs need about {needed / 1e6:,.1f} MB in {directory}, where {free / 1e6:,.1f} MB are free{advice}"
                )
        directory.mkdir(parents=True, exist_ok=True)
        with disk_errors(f"writing {directory}"):
            if not begun:
                write_json(directory / MANIFEST, facts)
                seal(directory / MANIFEST)
            for number, tensors in shards(missing) if missing else ():
                with written_beside(directory / shard_file(number)) as temporary:
                    save_file({name: value.contiguous().cpu() for name, value in tensors.items()}, temporary)
                seal(directory / shard_file(number))
        return cls(directory)

    def read(self, batch: Batch) -> Tensors:
        """The stored tensors of a batch's rows, `[b, ...]` each, on its device."""
        at_once, parts = self.facts["shard_rows"], list[Tensors]()
        for row in (batch.rows + self.first).tolist():
            if not 0 <= row < self.facts["rows"]:
                raise RequestError(f"row {row} is not in the teacher's cache of {self.facts['rows']} rows")
            with safe_open(self.directory / shard_file(row // at_once), framework="pt") as file:
                names = file.keys()
                parts.append({name: file.get_slice(name)[row % at_once] for name in names})
        return {name: torch.stack([part[name] for part in parts]).to(batch.ids.device) for name in parts[0]}

    def likeliest(self, tensors: Tensors) -> SparseTargets:
        """Of what `read` gave: ids `[b, s, k]`, probabilities that add up to 1 with the rest's."""
        log_probs, rest = tensors["log_probs"].float(), tensors["rest"]
        # float16 has rounded them one by one.
        total = torch.logsumexp(torch.cat([log_probs, rest[..., None].log()], -1), -1)
        rescaled = (log_probs - total[..., None], rest * (-total).exp())
        return SparseTargets(tensors["ids"].to(torch.int64), *rescaled)

    def targets(self, batch: Batch) -> Any:
        """What the teacher says next at each position of a batch's rows."""
        return self.likeliest(self.read(batch))


def likeliest_tensors(logits: torch.Tensor, k: int, temperature: float) -> Tensors:
    """The `k` likeliest tokens of logits `[..., vocab]`, as a shard has them."""
    found = SparseTargets.of(logits, k, temperature)
    log_probs = found.log_probs.clamp_min(SMALLEST).to(torch.float16)
    return {"ids": found.ids.to(_id_dtype(logits.shape[-1])), "log_probs": log_probs, "rest": found.rest.float()}


def likeliest_bytes(positions: int, k: int, vocabulary: int) -> int:
    """What the likeliest tokens of so many positions take on the disk."""
    return positions * (k * (_id_dtype(vocabulary).itemsize + 2) + 4)


def cache_teacher(
    teacher: Teacher,
    rows: TextRows,
    directory: Path,
    *,
    k: int = 64,
    temperature: float = 1.0,
    kept: torch.Tensor | None = None,
    told: Told | None = None,
) -> TeacherCache:
    """The teacher's `k` likeliest tokens at every position of the rows; what is missing of them is computed.

    Args:
        rows: `[n, s]`.
        k: at most the vocabulary.
        temperature: that logits are divided by, above 0.
        kept: int `[v]`: a trimmed draft's tokens (`vocab_trim`); distributions are then over these alone, ids their indices.
        told: is called with rows done and rows in all.

    Raises:
        CompressError: the disk has no room.
    """
    vocabulary, length = teacher.vocabulary if kept is None else len(kept), rows.length
    shard_rows = max(1, SHARD_BYTES // likeliest_bytes(length, k, vocabulary))
    facts: dict[str, Any] = {
        "teacher": teacher.fingerprint, "sha256": digest_of(rows.ids), "rows": len(rows), "length": length, "vocabulary": vocabulary,
        "kept": kept_digest(kept), "k": k, "temperature": float(temperature), "shard_rows": min(shard_rows, len(rows)),
    }  # fmt: skip

    def shards(missing: list[int]) -> Iterable[tuple[int, Tensors]]:
        for number in missing:
            start = number * facts["shard_rows"]
            parts = []
            for ids in rows.ids[start : start + facts["shard_rows"]].split(_TOGETHER):
                logits = teacher.logits(ids.to(teacher.device))
                if kept is not None:
                    logits = logits[..., kept.to(logits.device, torch.int64)]
                parts.append(likeliest_tensors(logits, k, temperature))
            yield number, {name: torch.cat([part[name].cpu() for part in parts]) for name in parts[0]}
            if told is not None:
                told(min(start + facts["shard_rows"], len(rows)), len(rows))

    return TeacherCache.fill(directory, facts, likeliest_bytes(rows.ids.numel(), k, vocabulary), shards)


_TOGETHER = 8  # rows in a forward pass of the teacher


def shard_file(number: int) -> str:
    """File name of a shard of the cache."""
    return f"shard-{number:05d}.safetensors"


def kept_digest(kept: torch.Tensor | None) -> str:
    """SHA-256 (hex) of a trimmed vocabulary; empty: it is whole."""
    return "" if kept is None else digest_of(kept.to(torch.int64))


def _id_dtype(vocabulary: int) -> torch.dtype:
    return torch.uint16 if vocabulary <= 2**16 else torch.int32
