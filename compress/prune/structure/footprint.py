"""Footprint of a stage `structure` before it is carried out: memory, disk and time."""

from __future__ import annotations

from dataclasses import replace

import torch

from compress.model.footprint import Footprint, Rows, Speed, tokens
from compress.prune.structure.cut_plan import CutPlan
from compress.prune.structure.gradients import ROWS
from compress.prune.structure.width_allocation import MOST

_COLLECTED = frozenset({"hessian", "ranges", "influence", "states", "routing"})  # from blocks, over all rows
# Float64 matrices that there are at once while a layer is fitted: inputs by inputs, and outputs by inputs.
_SQUARES, _SIDES = 5, 5
_PAIRS = 6  # float32 ones where every unit is compared with every other
_ROUNDS = 64  # removals one after the other, unless the recipe says how many go at once
_ROUND = 1.5e-8  # seconds that bringing one number of the moments up to date takes in one of them


def structure_footprint(job: CutPlan, rows: Rows, length: int, speed: Speed, device: torch.device) -> Footprint:
    """Footprint of a job.

    Args:
        rows: batches of calibration text. length: tokens of a row of it.
        device: where blocks run.
    """
    needs = _by_block(job, rows, speed, device)
    return needs.after(_gradients(job, rows, length, speed, device)) if "gradients" in job.needs else needs


def few_tokens(job: CutPlan, count: int) -> str:
    """A warning where second moments of more inputs are needed than there are calibration tokens; else ""."""
    inputs = _solved_inputs(job)
    if count >= inputs:
        return ""
    return (
        f"{count:,} tokens of calibration text are few for layers with {inputs:,} inputs, whose second moments stage {job.stage.index} "
        f"({job.stage.kind}) needs; ask for more rows, or longer ones"
    )


def _inputs(job: CutPlan) -> int:
    """Inputs of the widest layer that reads removed units."""
    if job.settings.remove == "hidden":
        return job.whole.widest
    return max((c.columns.each * c.count for block in job.units for c in block), default=0)


def _solved_inputs(job: CutPlan) -> int:
    """Inputs of the widest layer whose second moments are needed; 0: none."""
    fitted = job.settings.remove == "hidden" and job.settings.reconstruct
    return _inputs(job) if fitted or "hessian" in job.needs else 0


def _gradients(job: CutPlan, rows: Rows, length: int, speed: Speed, device: torch.device) -> Footprint:
    """The whole model, float32, and its activations."""
    whole = job.whole
    numbers = 17 * whole.blocks * whole.hidden + 5 * whole.vocabulary
    activations = 4 * ROWS * length * numbers
    seconds = 6.0 * whole.total * tokens(rows) / speed.single
    shorter = "lower calibration.sequence_length, " if activations > 4 * whole.total // 10 else ""
    advice = (
        f"{job.stage.method} has the whole model in memory: {shorter}use a method that has not, or a machine with more"
    )
    needed = 4 * whole.total + activations
    on_cpu = device.type == "cpu"
    return Footprint(memory=needed if on_cpu else 0, device=0 if on_cpu else needed, seconds=seconds, advice=advice)


def _by_block(job: CutPlan, rows: Rows, speed: Speed, device: torch.device) -> Footprint:
    """Hidden states of all rows, where anything is collected; what is in no block; a block, cut, and compared in float32."""
    whole, remove = job.whole, job.settings.remove
    both = remove == "hidden" and job.settings.reconstruct  # the whole model and the smaller one, side by side
    models = 2 if both else 1
    seen = rows if job.needs & _COLLECTED else []
    states, forward = models * whole.states(seen), models * whole.forward(seen)
    outside = whole.itemsize * whole.outside
    if remove == "hidden":
        parts = 2 * outside + 2 * (whole.itemsize + 4) * whole.block
    elif remove == "vocabulary":  # the last part is cut while the whole is there, and then loaded to be compared
        parts = 3 * outside + whole.itemsize * whole.block
    else:
        parts = outside + (3 * whole.itemsize + 8) * whole.block
    inputs = _solved_inputs(job)
    moments = (12 if both else 4) * inputs**2
    solve = 8 * (_SQUARES * inputs**2 + _SIDES * inputs * whole.hidden)  # on the CPU, wherever the model is
    if job.method.pairwise:
        solve = max(solve, 4 * _PAIRS * _inputs(job) ** 2)
    computed = parts + moments + forward
    needs = Footprint(
        memory=computed + solve,
        states=states,
        disk=3 * states,  # what enters two blocks, in case one is damaged, and what enters the next
        seconds=_seconds(job, seen, speed),
        advice=_advice(computed, solve, forward),
    )
    if device.type == "cpu":
        return needs
    return replace(needs, memory=solve + (whole.itemsize + 4) * whole.block, device=computed)


def _advice(computed: int, solve: int, forward: int) -> str:
    if forward > (computed + solve) // 10:
        return "lower calibration.batch_size or sequence_length, or use a machine with more"
    if solve > (computed + solve) // 2:
        return (
            "its widest layer needs that much to be fitted; set reconstruct: false with a method that needs no second moments, or use a "
            "machine with more"
        )
    return "its largest block needs that much; use a machine with more"


def _seconds(job: CutPlan, rows: Rows, speed: Speed) -> float:
    """Passes over the text, sums of second moments, and solving; the text is passed over up to the reader and once more to go on."""
    whole, count, remove = job.whole, tokens(rows), job.settings.remove
    passes = {"layers": 2.0, "experts": 3.0, "hidden": 6.4 if job.settings.reconstruct else 2.0}.get(remove, 2.2)
    total = passes * 2.0 * whole.inside * count / speed.own
    inputs = _solved_inputs(job)
    if not inputs:
        return total
    if remove == "hidden":
        return total + sum(
            6.0 * count * read**2 / speed.single + _solved(read, written, speed) for read, written in whole.linears
        )
    each = 1.0 * count * inputs**2 / speed.single
    if job.settings.reconstruct:
        each += _solved(inputs, whole.hidden, speed)
    if job.settings.allocation == "error":  # all is done once more, before, and fitted at each of some widths
        total *= 2
        each *= 2 + (MOST - 2 if job.settings.reconstruct else 0)
    if "hessian" in job.method.needs:
        at_once = getattr(job.settings, "at_once", None)
        rounds = _ROUNDS if at_once is None else (job.size.count - job.kept) / at_once
        each += 3.0 * inputs**3 / speed.double + _ROUND * rounds * inputs**2
    return total + each * sum(len(channels) for channels in job.units)


def _solved(inputs: int, outputs: int, speed: Speed) -> float:
    """Seconds of one least squares."""
    return 2.0 * (inputs**3 / 3 + 2 * outputs * inputs**2) / speed.double
