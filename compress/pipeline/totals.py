"""What a whole run takes: the most of what its passes take one after the other, and the time of all of them."""

from __future__ import annotations

from dataclasses import dataclass, replace

import psutil
import torch

from compress.pipeline.compress_needs import compress_needs, reads, unsettled
from compress.pipeline.needs import Needs, Rows, Speed
from compress.pipeline.progress import memory_bytes
from compress.pipeline.session import Session
from runtime.decoding.memory import available_bytes

# Free space that is left alone on the disk, and the part of the free memory that a run may plan with.
DISK_MARGIN = 64 * 2**20
MEMORY_SHARE = 0.9
# Libraries keep workspaces (oneDNN, BLAS, allocator slack) beyond the tensors one can count; measured on CPU runs.
WORKSPACE = 96 * 2**20
# Hidden states larger than this share of the free memory live in files.
SPILL_SHARE = 0.2


@dataclass(frozen=True)
class Totals:
    """Of a run.

    Attributes:
        memory: bytes at its peak, of `available_memory`, what the process holds already counted in both; what would take less: `advice`.
        device: bytes of a GPU's memory that passes take, of `available_device`; 0 where none does; `device_advice`.
        disk: bytes.
        seconds: about.
        spill: hidden states live in files.
    """

    memory: int
    available_memory: int
    advice: str
    device: int
    available_device: int
    device_advice: str
    disk: int
    seconds: float
    spill: bool


def totals(session: Session, evaluation: torch.Tensor | None, after: int) -> Totals:
    """Of all passes of a session's run, and the compression that follows them.

    Args:
        evaluation: ids `[n, s]` that the result is judged by; None: it is not.
        after: bytes of the artifact.
    """
    device, speed = session.streamed.device, Speed.measured(session.streamed)
    rows = _rows(session)
    last = compress_needs(session, session.work, rows if session.needs_data else [], evaluation, speed)
    passes = [_pass(session, number, rows, speed) for number in range(len(session.jobs))]
    every = [*passes, last]
    on_cpu = device.type == "cpu"
    free = psutil.virtual_memory().available
    room = free if on_cpu else min(free, available_bytes(device))
    spill = max(needs.states for needs in every) > SPILL_SHARE * room
    if spill:
        every = [replace(needs, states=0) for needs in every]
    # Of the last one, whose parts are small, nothing is said of a GPU.
    inside = every if on_cpu else [replace(needs, states=0) for needs in every[:-1]] + every[-1:]
    most = max(inside, key=lambda needs: needs.memory + needs.states)
    beside = max(every[:-1], key=lambda needs: needs.device + needs.states, default=Needs())
    device_needed = 0 if on_cpu or not passes else beside.device + beside.states + WORKSPACE
    held = memory_bytes()
    return Totals(
        memory=held + WORKSPACE + most.memory + most.states,
        available_memory=held + free,
        advice=most.advice,
        device=device_needed,
        available_device=0 if on_cpu else available_bytes(device),
        device_advice=beside.advice,
        disk=_disk(session, passes, last, after, spill) + DISK_MARGIN,
        seconds=sum(needs.seconds for needs in every),
        spill=spill,
    )


def _rows(session: Session) -> Rows:
    """Shapes of the batches of calibration text; none where nothing reads it."""
    wanted = session.needs_data or reads(unsettled(session)) or any(job.needs for job in session.jobs)
    return [tuple(ids.shape) for ids, _ in session.batches] if wanted else []


def _pass(session: Session, number: int, rows: Rows, speed: Speed) -> Needs:
    """Of a job; before a recovery layers are compressed, where stages before it do that."""
    job = session.jobs[number]
    needs = job.takes(session, rows, speed)
    place = ("stages", job.stage.index, job.stage.kind)
    needs = replace(needs, advice=session.recipe.origin.at(place, needs.advice))
    layered = [s for s in session.recipe.stages if s.kind in ("prune", "quantize") and s.index < job.stage.index]
    if job.stage.kind != "recover" or not layered:
        return needs
    works = unsettled(session)
    before = compress_needs(session, works, rows if reads(works) else [], None, speed)
    # The artifact that they make is read by the training; it is no larger than the model, but for what cannot be packed.
    return needs.after(replace(before, disk=before.disk + session.checkpoint.total_bytes))


def _disk(session: Session, passes: list[Needs], last: Needs, after: int, spill: bool) -> int:
    """Every pass reads the checkpoint of the one before it and writes its own; the last one's stays until the artifact is complete."""
    models = [job.stored for job in session.jobs] + [session.checkpoint.total_bytes]
    ends = [(models[number] if number else 0) + models[number + 1] + needs.disk for number, needs in enumerate(passes)]
    ends.append((models[-1] if passes else 0) + after + last.disk + (last.spilled if spill else 0))
    return max(ends)
