"""What a whole run takes: the most of what its passes take one after the other, and the time of all of them."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from compress.distill.team import on_this_machine
from compress.pipeline.bounds import Bounds, choose, cut, ways
from compress.pipeline.compress_needs import CompressNeeds, reads, unsettled
from compress.pipeline.needs import Needs, Rows, Speed
from compress.pipeline.progress import memory_bytes
from compress.pipeline.session import Session
from runtime.decoding.memory import available_bytes
from runtime.memory import free_bytes

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
        least: bytes at the peak where all is done that takes less; None: that was not asked for.
        parts: bytes by what they are for: the process as it is, workspaces, hidden states, and each phase of compressing layers, one after
            the other.
        device: bytes of a GPU's memory that passes take, of `available_device`; 0 where none does; `device_advice`.
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


def totals(
    session: Session,
    evaluation: torch.Tensor | None,
    after: int,
    limit: int | None = None,
    settled: Bounds | None = None,
) -> Totals:
    """Of all passes of a session's run, and the compression that follows them.

    Args:
        evaluation: ids `[n, s]` that the result is judged by; None: it is not.
        after: bytes of the artifact.
        limit: bytes that the process may take; None: what is free.
        settled: as a run began that goes on; its rows stay.
    """
    every = _Every(session, evaluation)
    device = session.streamed.device
    on_cpu = device.type == "cpu"
    free, held = free_bytes() // on_this_machine(), memory_bytes()
    room = free if on_cpu else min(free, available_bytes(device))
    found = list(
        ways(
            every.last.set.widths,
            every.rows(),
            None if settled is None else settled.rows,
            fewer=limit is not None and settled is None,
            filed=on_cpu,
        )
    )
    share = SPILL_SHARE * (room if limit is None else min(room, limit))
    if len(found) > 1 and max(needs.states for needs in every.needs(found[0])) > share:
        found = found[1:]

    def needed(bounds: Bounds) -> int:
        needs = every.needs(bounds)
        # Of the last one, whose parts are small, nothing is said of a GPU.
        inside = needs if on_cpu else [replace(one, states=0) for one in needs[:-1]] + needs[-1:]
        return held + WORKSPACE + max(one.memory + _states(one, bounds) for one in inside)

    bounds, memory = choose(iter(found), needed, MEMORY_SHARE * (held + free) if limit is None else limit)
    needs = every.needs(bounds)
    most = max(needs, key=lambda one: one.memory + _states(one, bounds))
    beside = max(needs[:-1], key=lambda one: one.device + _states(one, bounds), default=Needs())
    device_needed = 0 if on_cpu or len(needs) == 1 else beside.device + _states(beside, bounds) + WORKSPACE
    return Totals(
        memory=memory,
        least=None if limit is None else min(map(needed, found)),
        available_memory=held + free,
        parts={
            "process": held,
            "workspace": WORKSPACE,
            "hidden states": _states(most, bounds),
            **every.phases(bounds),
            **{job.stage.kind: one.memory for job, one in zip(session.jobs, needs, strict=False)},
        },
        advice=most.advice,
        device=device_needed,
        available_device=0 if on_cpu else available_bytes(device),
        device_advice=beside.advice,
        disk=_disk(session, needs[:-1], needs[-1], after, bounds.spill) + DISK_MARGIN,
        seconds=sum(one.seconds for one in needs),
        bounds=bounds,
    )


def _states(needs: Needs, bounds: Bounds) -> int:
    return 0 if bounds.spill else needs.states


class _Every:
    """What all passes of a run need, by what is done to need less."""

    def __init__(self, session: Session, evaluation: torch.Tensor | None) -> None:
        self._session = session
        self._speed = Speed.measured(session.streamed)
        self.last = CompressNeeds(session, session.work, evaluation, self._speed)
        works = unsettled(session)
        self._text = session.needs_data or reads(works) or any(job.needs for job in session.jobs)
        self._works = works
        self._before: CompressNeeds | None = None

    def rows(self) -> int:
        """Rows of the largest batch of calibration text; 0: nothing reads any."""
        return max((ids.shape[0] for ids, _ in self._session.calibration.batches), default=0) if self._text else 0

    def needs(self, bounds: Bounds) -> list[Needs]:
        """Of each pass, and of the compression in the end."""
        rows = self._shapes(bounds)
        passes = [self._pass(number, rows, bounds) for number in range(len(self._session.jobs))]
        return [*passes, self.last.under(bounds, rows if self._session.needs_data else [])]

    def phases(self, bounds: Bounds) -> dict[str, int]:
        """Of the compression in the end."""
        return self.last.set.phases(self._shapes(bounds) if self._session.needs_data else [], bounds)

    def _shapes(self, bounds: Bounds) -> Rows:
        if not self._text:
            return []
        session = self._session
        parts = (part for batch in session.calibration.batches for part, _ in cut(batch, bounds.rows))
        return [session.streamed.rows.positions(part) for part in parts]

    def _pass(self, number: int, rows: Rows, bounds: Bounds) -> Needs:
        """Of a job; before a recovery layers are compressed, where stages before it do that."""
        session = self._session
        job = session.jobs[number]
        needs = job.takes(session, rows, self._speed)
        place = ("stages", job.stage.index, job.stage.kind)
        needs = replace(needs, advice=session.recipe.origin.at(place, needs.advice))
        layered = [s for s in session.recipe.stages if s.kind in ("prune", "quantize") and s.index < job.stage.index]
        if job.stage.kind != "recover" or not layered:
            return needs
        if self._before is None:
            self._before = CompressNeeds(session, self._works, None, self._speed)
        before = self._before.under(bounds, rows if reads(self._works) else [])
        # The artifact that they make is read by the training; it is no larger than the model, but for what cannot be packed.
        return needs.after(replace(before, disk=before.disk + session.checkpoint.total_bytes))


def _disk(session: Session, passes: list[Needs], last: Needs, after: int, spill: bool) -> int:
    """Every pass reads the checkpoint of the one before it and writes its own; the last one's stays until the artifact is complete."""
    models = [job.stored for job in session.jobs] + [session.checkpoint.total_bytes]
    ends = [(models[number] if number else 0) + models[number + 1] + needs.disk for number, needs in enumerate(passes)]
    ends.append((models[-1] if passes else 0) + after + last.disk + (last.spilled if spill else 0))
    return max(ends)
