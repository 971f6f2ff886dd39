"""Footprint of a whole run: the peak memory of its stages, which run one after the other, and the time of all of them."""

from __future__ import annotations

from dataclasses import dataclass, replace

from compress.core.memory_bounds import MEMORY_SHARE, Bounds, choose, cut, ways
from compress.core.processes import on_this_machine
from compress.core.progress import memory_bytes
from compress.model.footprint import Footprint, Rows, Speed
from compress.model.stage import Job
from compress.run.session import Session, layers_before
from compress.weights.footprint import WeightsFootprint
from runtime.system.memory import available_bytes, free_bytes

# Free space that is left alone on the disk.
DISK_MARGIN = 64 * 2**20
# Libraries keep workspaces (oneDNN, BLAS, allocator slack) beyond the tensors one can count; measured on CPU runs.
WORKSPACE = 96 * 2**20
# Hidden states larger than this share of the free memory live in files.
SPILL_SHARE = 0.2


@dataclass(frozen=True)
class Totals:
    """Of a run.

    Attributes:
        memory: bytes at its peak, of `available_memory`, what the process holds already counted in both; what would take less: `advice`.
        least: bytes at the peak where all is done that takes less; None: that was not asked for.
        parts: bytes by what they are for: the process as it is, workspaces, hidden states, and each phase of the run.
        device: bytes of a GPU's memory that stages take, of `available_device`; 0 where none does; `device_advice`.
        disk: bytes.
        seconds: about.
        bounds: what the run does to need less.
    """

    memory: int
    least: int | None
    available_memory: int
    parts: dict[str, int]
    advice: str
    device: int
    available_device: int
    device_advice: str
    disk: int
    seconds: float
    bounds: Bounds


def totals(session: Session, after: int, limit: int | None = None, settled: Bounds | None = None) -> Totals:
    """Of all stages of a session's run.

    Args:
        after: bytes of the artifact.
        limit: bytes that the process may take; None: what is free.
        settled: as a run began that goes on; its rows stay.
    """
    stages = _Stages(session)
    device = session.context.streamed.device
    on_cpu = device.type == "cpu"
    free, held = free_bytes() // on_this_machine(), memory_bytes()
    room = free if on_cpu else min(free, available_bytes(device))
    rows = None if settled is None else settled.rows
    fewer = limit is not None and settled is None
    found = list(ways(session.weights.widths, stages.rows(), rows, fewer=fewer, filed=on_cpu))
    share = SPILL_SHARE * (room if limit is None else min(room, limit))
    if len(found) > 1 and max(one.states for one in stages.footprints(found[0])) > share:
        found = found[1:]

    def needed(bounds: Bounds) -> int:
        every = stages.footprints(bounds)
        # Hidden states are where blocks are; of the last stage, whose parts are small, nothing is said of a GPU.
        inside = every if on_cpu else [replace(one, states=0) for one in every[:-1]] + every[-1:]
        return held + WORKSPACE + max(one.memory + one.states for one in inside)

    bounds, memory = choose(found, needed, MEMORY_SHARE * (held + free) if limit is None else limit)
    every = stages.footprints(bounds)
    most = max(every, key=lambda one: one.memory + one.states)
    beside = max(every[:-1], key=lambda one: one.device + one.states, default=Footprint())
    device_needed = 0 if on_cpu or len(every) == 1 else beside.device + beside.states + WORKSPACE
    named = [one.parts or {job.stage.kind: one.memory} for job, one in zip(stages.jobs, every, strict=True)]
    parts = {"process": held, "workspace": WORKSPACE, "hidden states": most.states}
    for one in (named[-1], *named[:-1]):
        parts |= one
    return Totals(
        memory=memory,
        least=None if limit is None else min(map(needed, found)),
        available_memory=held + free,
        parts=parts,
        advice=most.advice,
        device=device_needed,
        available_device=0 if on_cpu else available_bytes(device),
        device_advice=beside.advice,
        disk=_disk(session, every, after, bounds.spill) + DISK_MARGIN,
        seconds=sum(one.seconds for one in every),
        bounds=bounds,
    )


class _Stages:
    """Footprints of the stages of a session under given bounds."""

    def __init__(self, session: Session) -> None:
        self.jobs = (*session.before, session.weights)
        self._context, self._recipe = session.context, session.recipe
        self._speed = Speed.measured(self._context.streamed)
        self._layers = session.weights.weights.unsettled()
        self._uncompressed: WeightsFootprint | None = None

    def rows(self) -> int:
        """Rows of the largest batch of calibration text; 0: nothing reads any."""
        if not self._layers.needs and not any(job.needs for job in self.jobs):
            return 0
        return max((ids.shape[0] for ids, _ in self._context.calibration.batches), default=0)

    def footprints(self, bounds: Bounds) -> list[Footprint]:
        """Of each job; hidden states that spill take no memory."""
        rows: Rows = []
        if self.rows():
            parts = (part for batch in self._context.calibration.batches for part, _ in cut(batch, bounds.rows))
            rows = [self._context.streamed.rows.positions(part) for part in parts]
        found = [self._footprint(job, rows, bounds) for job in self.jobs]
        return [replace(one, states=0) for one in found] if bounds.spill else found

    def _footprint(self, job: Job, rows: Rows, bounds: Bounds) -> Footprint:
        """Of a job, and of compressing the layers that it works on."""
        found = job.footprint(self._context, rows, bounds, self._speed)
        if job is self.jobs[-1]:
            return found
        found = replace(found, advice=self._recipe.origin.at(job.stage.path, found.advice))
        if layers_before(self._recipe, job.stage) is None:
            return found
        if self._uncompressed is None:
            self._uncompressed = WeightsFootprint(self._layers, judged=False)
        before = self._uncompressed.under(bounds, rows if self._layers.needs else [], self._speed)
        # The artifact that they make is read by the job; it is no larger than the model, but for what cannot be packed.
        return found.after(replace(before, disk=before.disk + self._context.checkpoint.total_bytes, parts={}))


def _disk(session: Session, every: list[Footprint], after: int, spill: bool) -> int:
    """Every stage reads the checkpoint of the one before it and writes its own; the last one's stays until the artifact is complete."""
    models = [job.stored for job in session.before] + [session.context.checkpoint.total_bytes]
    *passes, last = every
    ends = [(models[number] if number else 0) + models[number + 1] + one.disk for number, one in enumerate(passes)]
    ends.append((models[-1] if passes else 0) + after + last.disk + (last.spilled if spill else 0))
    return max(ends)
