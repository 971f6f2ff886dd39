"""Whoever recovery learns from: the whole model in memory, or what it gave for all rows, kept on the disk."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any, Protocol

import torch

from compress.core.files import disk_errors, intact, seal, write_json, written_beside
from compress.distill.recover.followed import Followed
from compress.distill.recover.outputs import Outputs, Reader
from compress.distill.train.data import Batch, digest_of
from compress.distill.train.losses import SparseTargets
from compress.kv_cache.statistics import Progress
from compress.model.hidden_states import HiddenStates
from compress.model.streamed import Batch as Rows
from compress.model.streamed import StreamedModel
from runtime.checkpoint.artifact import Artifact
from runtime.checkpoint.checkpoint import read_json
from runtime.engines.torch.engine import Blueprint
from runtime.errors import CompressError

ROWS = 4  # of a forward pass of a streamed teacher, and of a file
SPARE = 64 * 2**20  # bytes left free on the disk


class RecoveryTeacher(Protocol):
    """Gives outputs of rows.

    Attributes:
        facts: what decides them, JSON-able.
    """

    facts: dict[str, Any]

    def outputs(self, batch: Batch) -> Outputs:
        """Of a batch, on its device, without gradients."""


class Nobody:
    """Where the text alone is learned from."""

    def __init__(self) -> None:
        self.facts: dict[str, Any] = {"teacher": None}

    def outputs(self, batch: Batch) -> Outputs:
        return Outputs([], None)


class InMemory:
    """The whole model, as its checkpoint stores it.

    Args:
        streamed: the checkpoint. followed: what of it is wanted.
    """

    def __init__(self, streamed: StreamedModel, followed: Followed, device: torch.device) -> None:
        self.facts = {"teacher": streamed.checkpoint.fingerprint(), **followed.facts}
        self.followed = followed
        model = Blueprint(Artifact(streamed.checkpoint.path), device, "reference", None, False).build_module()
        model.requires_grad_(False)
        self._reader = Reader(model.eval(), streamed, followed.layers)

    @torch.no_grad()
    def outputs(self, batch: Batch) -> Outputs:
        return self.followed.outputs(self._reader(self.followed.asked(batch.ids)))


class Cached:
    """What `cache_outputs` has written for fixed rows.

    Args:
        first: the row that is row 0 of batches.
    """

    def __init__(self, directory: Path, first: int = 0) -> None:
        self.directory, self.first = directory, first
        self.facts = read_json(directory / "manifest.json")

    def outputs(self, batch: Batch) -> Outputs:
        parts = [self._row(self.first + row) for row in batch.rows.tolist()]
        device = batch.ids.device
        whole = {name: torch.stack([part[name] for part in parts]).to(device) for name in parts[0]}
        states = [whole[f"states-{place}"] for place in range(len(self.facts["layers"]))]
        logits = None
        if "ids" in whole:
            log_probs = whole["log_probs"].float()
            total = torch.logsumexp(torch.cat([log_probs, whole["rest"][..., None].log()], -1), -1)
            logits = SparseTargets(
                whole["ids"].long(),
                log_probs - total[..., None],
                whole["rest"] * (-total).exp(),
                self.facts["temperature"],
            )
        return Outputs(states, logits, whole.get("last"))

    def _row(self, row: int) -> dict[str, torch.Tensor]:
        from safetensors import safe_open

        if not 0 <= row < self.facts["rows"]:
            raise CompressError(
                f"row {row} is not among the {self.facts['rows']} that the teacher's outputs are kept of"
            )
        with safe_open(self.directory / _file(row // ROWS), framework="pt") as file:
            return {name: file.get_slice(name)[row % ROWS] for name in file.keys()}  # noqa: SIM118 - no mapping


def cache_outputs(
    streamed: StreamedModel,
    ids: torch.Tensor,
    followed: Followed,
    directory: Path,
    *,
    top: int,
    temperature: float,
    progress: Progress | None = None,
) -> Cached:
    """Compute a teacher's outputs of rows, one block in memory at a time, or take what an earlier call has written.

    Args:
        ids: int64 `[n, s]`, the model's in recovery. followed: what of the outputs is wanted.
        top: likeliest tokens of a position that are kept.

    Raises:
        CompressError: the disk has no room for them.
    """
    facts = {
        "teacher": streamed.checkpoint.fingerprint(), "rows": len(ids), "sha256": digest_of(ids), "top": top, "temperature": temperature,
        **followed.facts,
    }  # fmt: skip
    if intact(directory) and read_json(directory / "manifest.json") == facts:
        return Cached(directory)
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(parents=True)
    hidden = int(streamed.config.get_text_config().hidden_size)
    needed = cached_bytes(ids.numel(), hidden, streamed.dtype.itemsize, len(followed.layers), top)
    free = shutil.disk_usage(directory).free
    if needed + SPARE > free:
        raise CompressError(
            f"the teacher's outputs take about {needed / 1e9:.1f} GB in {directory} and {free / 1e9:.1f} GB are free: teach fewer "
            "rows, set squarehead: 0, or use teacher: memory"
        )
    _compute(streamed, followed.asked(ids), followed, directory, top, temperature, progress)
    write_json(directory / "manifest.json", facts)
    seal(directory)
    return Cached(directory)


def cached_bytes(positions: int, hidden: int, itemsize: int, layers: int, top: int) -> int:
    """What outputs of so many positions take on the disk, with the states that go from block to block while they are computed.

    Args:
        hidden: numbers of a state, of `itemsize` bytes. layers: whose states are kept. top: likeliest tokens that are.
    """
    return positions * (hidden * itemsize * (layers + 2) + 6 * top)


@torch.inference_mode()
def _compute(
    streamed: StreamedModel,
    ids: torch.Tensor,
    followed: Followed,
    directory: Path,
    top: int,
    temperature: float,
    progress: Progress | None,
) -> None:
    layers = list(followed.layers)
    batches: list[Rows] = [(rows, None) for rows in ids.split(ROWS)]
    kept: list[dict[str, Path]] = [{} for _ in batches]
    states = HiddenStates(len(batches), directory / "hidden")
    if progress is not None:
        progress.phase("teacher", len(streamed.blocks))
    streamed.load_outside()
    streamed.prelude(batches, states)
    with disk_errors(f"writing {directory}"):
        for index in range(len(streamed.blocks)):
            with streamed.loaded_block(index):
                for number, batch in enumerate(batches):
                    before = states.get(number).to(streamed.device)
                    own = streamed.run_block(index, before, batch)
                    if index in layers:
                        place = directory / f"block-{index:05d}-{number:05d}.safetensors"
                        kept[number][f"states-{layers.index(index)}"] = place
                        _save({"states": followed.states(own[:, : streamed.own_length(index, batch)])}, place)
                    states.put(number, streamed.hand_over(index, own, batch))
            if progress is not None:
                progress.step(f"teacher: block {index}")
        for number, (rows, _) in enumerate(batches):
            _save(
                {**_said(streamed, followed, states.get(number), rows, top, temperature), **_loaded(kept[number])},
                directory / _file(number),
            )
            for place in kept[number].values():
                place.unlink()
    states.drop()


def _said(
    streamed: StreamedModel, followed: Followed, state: torch.Tensor, rows: torch.Tensor, top: int, temperature: float
) -> dict[str, torch.Tensor]:
    given = streamed.outputs(state.to(streamed.device), rows)
    if streamed.kind == "encoder":
        return {"last": followed.states(given)}
    given = followed.logits(given)
    found = SparseTargets.of(given, min(top, given.shape[-1]), temperature)
    log_probs = found.log_probs.clamp_min(float(torch.finfo(torch.float16).min))
    return {"ids": found.ids.to(torch.int32), "log_probs": log_probs.half(), "rest": found.rest}


def _loaded(places: dict[str, Path]) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    return {name: load_file(place)["states"] for name, place in places.items()}


def _save(tensors: dict[str, torch.Tensor], place: Path) -> None:
    from safetensors.torch import save_file

    with written_beside(place) as temporary:
        save_file({name: value.contiguous().cpu() for name, value in tensors.items()}, temporary)


def _file(number: int) -> str:
    return f"rows-{number:05d}.safetensors"
