"""Teachers of recovery: the whole model in memory, or its outputs for all rows, streamed block by block and cached on disk."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from compress.core.files import written_beside
from compress.core.progress import Reporter
from compress.distill.recover.alignment import Alignment
from compress.distill.recover.outputs import Outputs, Reader
from compress.distill.train.data import Batch, digest_of
from compress.distill.train.teacher_cache import TeacherCache, Tensors, likeliest_tensors
from compress.model.streamed import Batch as Rows
from compress.model.streamed import StreamedModel, run_blocks
from runtime.checkpoint.artifact import Artifact
from runtime.engines.blueprint import Blueprint

ROWS = 4  # of a forward pass of a streamed teacher, and of a file
_ADVICE = ": teach fewer rows, set squarehead: 0, or use teacher: memory"


class InMemory:
    """The whole model, as its checkpoint stores it.

    Args:
        streamed: the checkpoint. alignment: what of it is wanted.
    """

    def __init__(self, streamed: StreamedModel, alignment: Alignment, device: torch.device) -> None:
        self.facts = {"teacher": streamed.checkpoint.fingerprint(), **alignment.facts}
        self.alignment = alignment
        model = Blueprint(Artifact(streamed.checkpoint.path), device, "reference", None, False).build_module()
        model.requires_grad_(False)
        self._reader = Reader(model.eval(), streamed, alignment.layers)

    @torch.no_grad()
    def targets(self, batch: Batch) -> Outputs:
        """What the model gives for a batch, on its device."""
        return self.alignment.outputs(self._reader(self.alignment.asked(batch.ids)))


class Cached(TeacherCache):
    """Outputs of fixed rows that `cache_outputs` has written."""

    def targets(self, batch: Batch) -> Outputs:
        """What the model gave for a batch's rows, on its device."""
        found = self.read(batch)
        states = [found[f"states-{place}"] for place in range(len(self.facts["layers"]))]
        return Outputs(states, self.likeliest(found) if "ids" in found else None, found.get("last"))


def cache_outputs(
    streamed: StreamedModel,
    ids: torch.Tensor,
    alignment: Alignment,
    directory: Path,
    top: int,
    temperature: float,
    progress: Reporter,
) -> Cached:
    """Compute a teacher's outputs of rows, one block in memory at a time, or take what an earlier call has written.

    Args:
        ids: int64 `[n, s]`, the model's in recovery. alignment: which of the outputs are wanted.
        top: tokens of each distribution that are cached, at `temperature`.

    Raises:
        CompressError: the disk has no room for them.
    """
    facts = {
        "teacher": streamed.checkpoint.fingerprint(), "rows": len(ids), "shard_rows": ROWS, "sha256": digest_of(ids),
        "top": top, "temperature": temperature, **alignment.facts,
    }  # fmt: skip
    hidden = int(streamed.config.get_text_config().hidden_size)
    nbytes = cached_bytes(ids.numel(), hidden, streamed.dtype.itemsize, len(alignment.layers), top)
    directory.parent.mkdir(parents=True, exist_ok=True)
    asked = alignment.asked(ids).split(ROWS)

    def shards(missing: list[int]) -> Iterable[tuple[int, Tensors]]:
        found = _streamed_outputs(
            streamed, [asked[number] for number in missing], alignment, directory, top, temperature, progress
        )
        return zip(missing, found, strict=True)

    return Cached.fill(directory, facts, nbytes, shards, _ADVICE)  # type: ignore[return-value]


def cached_bytes(positions: int, hidden: int, itemsize: int, layers: int, top: int) -> int:
    """What outputs of so many positions take on the disk, with the states that go from block to block while they are computed.

    Args:
        hidden: numbers of a state, of `itemsize` bytes. layers: whose states are kept. top: likeliest tokens that are.
    """
    return positions * (hidden * itemsize * (layers + 2) + 6 * top)


@torch.inference_mode()
def _streamed_outputs(
    streamed: StreamedModel,
    parts: list[torch.Tensor],
    alignment: Alignment,
    directory: Path,
    top: int,
    temperature: float,
    progress: Reporter,
) -> Iterable[Tensors]:
    """Outputs of each of some parts of the rows; states of all are on disk until the last block is done."""
    batches: list[Rows] = [(rows, None) for rows in parts]

    def place(layer: int, number: int) -> Path:
        return directory / f"block-{layer:05d}-{number:05d}.safetensors"

    def keep(layer: int, number: int, state: torch.Tensor) -> None:
        if layer in alignment.layers:
            kept = alignment.states(state[:, : streamed.own_length(layer, batches[number])])
            with written_beside(place(layer, number)) as temporary:
                save_file({"states": kept.contiguous().cpu()}, temporary)

    progress.phase("teacher", len(streamed.blocks))
    hidden = directory / "hidden"
    states = run_blocks(
        streamed, batches, hidden, lambda index: progress.step(f"teacher: block {index}"), on_state=keep
    )
    with streamed.outside():
        for number, rows in enumerate(parts):
            given = streamed.outputs(states.get(number).to(streamed.device), rows)
            files = [place(layer, number) for layer in alignment.layers]
            found = {f"states-{at}": load_file(file)["states"] for at, file in enumerate(files)}
            if streamed.kind == "encoder":
                found["last"] = alignment.states(given)
            else:
                given = alignment.logits(given)
                found |= likeliest_tensors(given, min(top, given.shape[-1]), temperature)
            yield found
            for file in files:
                file.unlink()
    states.drop()
