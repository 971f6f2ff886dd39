"""The most that each phase of compressing a model holds at once, told from shapes: bytes beside what the process holds anyway.

One phase after the other: what comes before the first block; the blocks, each solved and written; what is in no block; the artifact read
back; the two models run over held-out text.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import groupby

import torch

from compress.core.memory_bounds import Bounds, choose, cut, ways
from compress.core.processes import on_this_machine
from compress.core.progress import memory_bytes
from compress.core.statistics import BLOCK, ELEMENTS
from compress.model.expert_calibration import AT_ONCE
from compress.model.footprint import Counted, Needs, Rows, Speed, one_row_at_a_time, tokens
from compress.run.load_back import WHOLE_BYTES
from compress.run.session import Session
from compress.weights.layer_work import LayerWork
from compress.weights.solver import columns as chunks
from compress.weights.solver import factor
from runtime import formats
from runtime.modeling.experts import expert_of
from runtime.modeling.linear_modules import get_matrix
from runtime.system.memory import available_bytes, free_bytes

BlockWorks = Mapping[str, LayerWork]

#: Float32 matrices as large as the chunk of a column loop that are there at its peak; and of rounding to nearest, whose is twice so large.
LOOP, NEAREST = 9, 6
#: Panels of a matrix in a file that are in memory at once: of the factor, those it looks back at, and copies.
FACTORED = 5


@dataclass(frozen=True)
class _Layer:
    """A layer's work, and its numbers. `packed`: bytes on the disk. `home`: of the experts that it belongs to one of; "": of none."""

    work: LayerWork
    rows: int
    columns: int
    packed: int
    reader: str
    home: str

    @property
    def numel(self) -> int:
        return self.rows * self.columns


class WorkingSet:
    """Of one session's work.

    Args:
        works: the layers' work. evaluation: ids `[n, s]` that the result is judged by; None: it is not.
        judge: the model that the result is compared with, where it is another.
    """

    def __init__(
        self, session: Session, works: BlockWorks, evaluation: torch.Tensor | None, judge: Counted | None = None
    ) -> None:
        streamed = session.streamed
        self.model = Counted.of(streamed)
        self.judge = judge or self.model
        self.session = session
        self.item = streamed.dtype.itemsize
        self._windows = None if evaluation is None else session.streamed.rows.positions(evaluation)
        self._layers = {name: _layer(session, name, work) for name, work in works.items()}
        self._blocks = [
            [layer for name, layer in self._layers.items() if name.startswith(streamed.block_prefix(index))]
            for index in range(len(streamed.blocks))
        ]
        self._sizes = [sum(p.numel() for p in block.parameters()) * self.item for block in streamed.blocks]
        names = streamed.outside_names()
        self._outside = sum(session.checkpoint.held_bytes(n) for n in names)
        self._head = sum(session.checkpoint.held_bytes(n) for n in names if streamed.is_head(n))

    @property
    def widths(self) -> list[int]:
        """Inputs of the layers whose second moments are collected."""
        return sorted({layer.columns for layer in self._layers.values() if "hessian" in layer.work.needs})

    def phases(self, rows: Rows, bounds: Bounds) -> dict[str, int]:
        """By name.

        Args:
            rows: shapes of the batches of calibration text.
        """
        front, block = self._outside - self._head, max(self._sizes)
        outside = [layer for name, layer in self._layers.items() if not self.session.streamed.is_inside(name)]
        forward = self.model.forward(rows)
        held = self._outside if outside else 0
        found = {
            "first block": max(held, front) + self._sizes[0] + forward,
            "blocks": held
            + max(
                self._block(size, layers, rows, bounds, forward)
                for size, layers in zip(self._sizes, self._blocks, strict=True)
            ),
            "outside": self._outside_phase(outside, rows, bounds),
            "load back": front + self._read_back() + self._whole(),
        }
        if self._windows is not None:
            found["evaluation"] = self._judged(front, block)
        return found

    # ------------------------------------------------------------ blocks
    def _block(self, size: int, layers: list[_Layer], rows: Rows, bounds: Bounds, forward: int) -> int:
        """One block of `size` bytes, its results, and what is in memory at once to make them."""
        kept = sum(layer.packed for layer in layers)
        # Layers with quantized activations give way to modules of their own; the originals come back afterwards.
        kept += sum(layer.numel * self.item for layer in layers if layer.work.scheme.activations is not None)
        transformed = any(layer.work.transform is not None for layer in layers)
        sequential = self.session.recipe.true_sequential
        groups = [list(group) for _, group in groupby(sorted(layers, key=_input), key=_input)]
        late = [g for g in groups if sequential and any(layer.work.compensates for layer in g)]
        early = [g for g in groups if g not in late or any(layer.work.transform is not None for layer in g)]
        waiting = sum(self._moments(group, bounds) for group in early)
        most = forward + waiting
        if transformed:  # float32 copies of all weights, after the whole block was float32
            most = max(most, waiting + 4 * size // self.item + max(2 * 4 * sum(x.numel for x in g) for g in groups))
            waiting += 4 * size // self.item
        for group in groups:
            own = self._wave(group, late, bounds) if group in late else 0
            collected = own + forward + self._inputs(group, rows) if own or group in early else 0
            most = max(most, waiting + max(collected, own + self._solve(group, bounds)))
        return size + kept + most

    def _moments(self, group: list[_Layer], bounds: Bounds) -> int:
        """Second moments of the input of a group, where they are collected."""
        columns = group[0].columns
        if not any("hessian" in layer.work.needs for layer in group):
            return 0
        return 4 * columns * (min(columns, 2 * BLOCK) if bounds.filed(columns) else columns)

    def _wave(self, group: list[_Layer], late: list[list[_Layer]], bounds: Bounds) -> int:
        """Those that are collected together with a group's: experts' are, up to a bound."""
        own = self._moments(group, bounds)
        if not group[0].home or not own:
            return own
        alike = sum(1 for other in late if other[0].home == group[0].home and other[0].columns == group[0].columns)
        return min(alike * own, max(own, AT_ONCE))

    def _inputs(self, group: list[_Layer], rows: Rows) -> int:
        """Inputs in float32, and as much again for what is reduced of them."""
        batch = max((shape[0] * shape[1] for shape in rows), default=0)
        return 2 * 4 * min(batch * group[0].columns, max(ELEMENTS, group[0].columns))

    def _solve(self, group: list[_Layer], bounds: Bounds) -> int:
        """Solving and packing the layers that share an input, beside its second moments."""
        columns, numel = group[0].columns, sum(layer.numel for layer in group)
        largest = max(layer.numel for layer in group)
        solved = pack = 0
        for layer in group:
            work, pattern = layer.work, None if layer.work.prune is None else layer.work.prune.parsed
            apart = chunks.rows_are_independent(pattern, work.scheme.weights)
            chunk = min(numel if work.compensates else layer.numel, chunks.rows_at_a_time(columns) * columns)
            if work.compensates:
                panels = 4 * columns * min(columns, factor.PANEL)
                needed = (
                    FACTORED * panels
                )  # of which two are of the factor, whose upper half is all that is ever touched
                if not bounds.filed(columns):
                    needed += max(0, 2 * columns * (columns + factor.PANEL) - 2 * panels)
                needed += LOOP * 4 * (chunk if apart else layer.numel)
            else:
                needed = NEAREST * 4 * min(layer.numel, 2 * chunk)
                if work.scheme.grid is not None and work.scheme.grid.strategy == "tensor":
                    needed += 2 * 4 * layer.numel
            if pattern is not None and not work.pruned:  # masks, and values fitted to them, or scores and their order
                needed += 6 * numel if work.compensates else numel + 20 * layer.numel
            solved = max(solved, needed)
            pack = max(pack, layer.packed + 2 * self.item * layer.numel + layer.numel)
        codes = numel * (1 if group[0].work.scheme.weights is not None else self.item)
        return codes + max(solved, pack, 2 * self.item * largest)

    def files(self, bounds: Bounds) -> int:
        """Bytes of second moments and factors in files, at the most."""
        filed = [
            layer for layer in self._layers.values() if bounds.filed(layer.columns) and "hessian" in layer.work.needs
        ]
        inputs = {
            (layer.reader, layer.columns) for layer in filed if not layer.work.compensates or layer.work.transform
        }
        largest = max((4 * layer.columns**2 for layer in filed), default=0)
        blocks = max(1, len(self._blocks))
        return sum(4 * columns**2 for _, columns in inputs) // blocks + max(
            2 * largest, AT_ONCE if any(x.home for x in filed) else 0
        )

    # ------------------------------------------------------------ before and after
    def _outside_phase(self, layers: list[_Layer], rows: Rows, bounds: Bounds) -> int:
        """What is in no block is read again to be written, beside what was solved of it."""
        if not layers:
            return self._outside
        made = sum(layer.packed + layer.numel * self.item for layer in layers)
        solve = max(
            max(self._moments([layer], bounds) + self._solve([layer], bounds), self._inputs([layer], rows))
            for layer in layers
        )
        return self._outside + made + max(solve, self._outside)

    def _read_back(self) -> int:
        """A block of the artifact: as it is stored, dense, and the layer that is unpacked."""
        most = 0
        for size, layers in zip(self._sizes, self._blocks, strict=True):
            largest = max((layer.numel for layer in layers), default=0)
            most = max(most, size + sum(layer.packed for layer in layers) + largest * (1 + self.item))
        return most

    def _whole(self) -> int:
        """Small artifacts are read as a whole, twice, with kernels that lay out their weights anew."""
        packed = sum(layer.packed for layer in self._layers.values())
        after = (
            packed + sum(self._sizes) + self._outside - sum(layer.numel * self.item for layer in self._layers.values())
        )
        return 2 * after if after <= WHOLE_BYTES else 0

    def _judged(self, front: int, block: int) -> int:
        """Either model block by block, then what they say of the text, with both heads."""
        from compress.evaluate.streamed import LOGIT_ROWS

        assert self._windows is not None
        config = self.session.recipe.evaluate
        batch = [(min(config.batch_size if config is not None else 1, self._windows[0]), self._windows[1])]
        judge = self.judge
        logits = 6 * 4 * max(LOGIT_ROWS, self._windows[1]) * self.session.vocabulary
        runs = max(
            judge.itemsize * (judge.outside + judge.block) + judge.forward(batch),
            front + self._read_back() + self.model.forward(batch),
        )
        return max(runs, judge.itemsize * judge.outside + self._outside + (0 if self.model.encoder else logits))


def _layer(session: Session, name: str, work: LayerWork) -> _Layer:
    streamed = session.streamed
    rows, columns = (int(n) for n in get_matrix(streamed.model.get_submodule(name)).shape)
    density = 1.0 - work.share
    packed = formats.choose(work.scheme, (rows, columns), density=density)
    place = expert_of(streamed.model, name)
    size = packed.bytes_estimate(work.scheme, (rows, columns), streamed.dtype, density)
    # Layers of one module and one width are taken to read the same input (q/k/v, gate/up), which is never too little.
    return _Layer(work, rows, columns, size, name.rpartition(".")[0], "" if place is None else place[0])


def _input(layer: _Layer) -> tuple[str, int]:
    return layer.reader, layer.columns


# What compressing the layers of a model takes before it is done, and judging the result: memory, disk and time.

Works = dict[str, LayerWork]


def unsettled(session: Session) -> Works:
    """The work as it is before the recoveries that settle some of it."""
    return {name: LayerWork(work.assignment, work.sparsity) for name, work in session.work.items()}


def reads(works: Works) -> bool:
    """Whether calibration text is needed."""
    return any(work.needs for work in works.values())


class CompressNeeds:
    """What the pass over the blocks takes.

    Args:
        works: the layers' work. evaluation: ids `[n, s]` that the result is judged by; None: it is not.
    """

    def __init__(self, session: Session, works: Works, evaluation: torch.Tensor | None, speed: Speed) -> None:
        self._session, self._works, self._speed = session, works, speed
        self._model = Counted.of(session.streamed)
        # Stages before have cut the model that the result is compared with.
        self._judge = self._model if session.source is None else Counted.of(session.reference)
        self._scored = 0 if evaluation is None else math.prod(session.streamed.rows.positions(evaluation))
        self.set = WorkingSet(session, works, evaluation, self._judge)

    def under(self, bounds: Bounds, rows: Rows) -> Needs:
        """With some bounds kept to; `rows`: batches of calibration text, none where nothing needs them."""
        model = self._model
        # Two models' hidden states are compared position by position, so evaluation holds both.
        judged = model.states([(1, self._scored)]) + self._judge.states([(1, self._scored)])
        return Needs(
            memory=max(self.set.phases(rows, bounds).values()),
            states=max(model.states(rows), judged),
            # What enters two blocks, in case one is damaged, and what enters the next.
            disk=3 * model.states(rows) + self.set.files(bounds),
            spilled=judged,
            seconds=_seconds(self._session, self._works, tokens(rows), self._scored, self._speed),
            advice=self._advice(bounds, rows),
        )

    def _advice(self, bounds: Bounds, rows: Rows) -> str:
        """What would make a run smaller: the batch, if it counts for anything, else only a larger machine."""
        batch, least = (max(self.set.phases(some, bounds).values()) for some in (rows, one_row_at_a_time(rows)))
        if batch - least > batch // 10:
            return "lower calibration.batch_size or sequence_length, or use a machine with more"
        return "its largest block and layer need that much; use a machine with more"


def _seconds(session: Session, works: Works, count: int, scored: int, speed: Speed) -> float:
    """A guess: forward passes, Hessians, column loops, start-up."""
    model, judge = Counted.of(session.streamed), Counted.of(session.reference)
    # Collecting stops early in three of four passes of a sequential block: little more than one full pass, and one to go on.
    total = 2.0 * (model.inside * (2.2 * count + scored) + judge.inside * scored) / speed.own
    for name, work in works.items():
        weight = session.streamed.model.get_submodule(name).weight
        out, columns = int(weight.shape[0]), int(weight.shape[1])  # type: ignore[union-attr, index]
        if "hessian" in work.needs:
            total += 1.0 * count * columns * columns / speed.single
            # The column loop, the error it leaves and what it is measured by; two more for a refinement pass; then the factor.
            times = 3 + 2 * int(getattr(work.quantize, "sweeps", 0) or 0)
            total += (times * out * columns * columns + columns**3 / 3) / speed.single
        total += out * columns * 8e-8
    return 2.0 + total


# What a whole run takes: the most of what its passes take one after the other, and the time of all of them.

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
