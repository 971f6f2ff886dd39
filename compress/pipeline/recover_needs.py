"""What a stage `recover` takes before it is carried out: memory, disk and time, without compressing layers before it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from compress.distill.recovery.teachers import cached_bytes
from compress.distill.team import launched
from compress.pipeline.needs import Counted, Needs, Speed

if TYPE_CHECKING:
    from compress.pipeline.recover_job import RecoverJob

# Bytes of a number that is trained: itself, its gradient and AdamW's moments; and beside them the best so far, with copies of it and its
# moments while a checkpoint is taken. A checkpoint has it, its moments and the best.
_TRAINED, _COPIES, _SAVED = 16, 16, 16
_HELD_OUT, _MOST_HELD_OUT = 8, 64  # an eighth of the rows, and at most so many
_SHARE = 10  # what is less than a tenth of the memory is not worth a word


def recovery_needs(job: RecoverJob, model: Counted, teacher: Counted, speed: Speed, device: torch.device) -> Needs:
    """What training takes.

    Args:
        model: that is trained. teacher: the model before all stages.
        device: where both are.
    """
    settings = job.settings
    whole = settings.adapter is None
    numbers = model.total if settings.adapter is None else _adapted(model, settings.adapter.rank)
    # Beside a weight that is changed is the one that comes of the change, and what is in between while it is made and derived by.
    weights = _TRAINED * numbers + (0 if whole else 4 * model.total + 12 * model.inside)
    asked = bool(settings.kl or settings.squarehead)
    taught = teacher.stored if asked and settings.teacher == "memory" else 0
    activations = _activations(job, model)
    computed, copies = weights + taught + activations, _COPIES * numbers
    disk = (
        3 * _SAVED * numbers
    )  # two checkpoints, in case one is damaged, and a third is there before the first one goes
    if asked and settings.teacher == "cached":
        layers = model.blocks if settings.squarehead else 0
        positions = settings.samples * settings.sequence_length
        disk += cached_bytes(positions, teacher.hidden, teacher.itemsize, layers, settings.teacher_top)
    on_cpu = device.type == "cpu"
    return Needs(
        memory=copies + (computed if on_cpu else 0),
        device=0 if on_cpu else computed,
        disk=disk,
        seconds=_seconds(job, model, teacher, speed, device),
        advice=_advice(job, computed + (copies if on_cpu else 0), taught, activations, weights),
    )


def held_out(rows: int) -> int:
    """How many of the rows are not trained on."""
    return min(_MOST_HELD_OUT, max(1, rows // _HELD_OUT))


def _adapted(model: Counted, rank: int) -> int:
    """Numbers of low-rank changes of all linear layers of the blocks."""
    return sum(min(rank, *sides) * sum(sides) for sides in model.linears)


def _activations(job: RecoverJob, model: Counted) -> int:
    """Of a layer and position what linear layers read and give is kept, and what norms do: at least 17 numbers of the hidden size
    (Korthikanti et al., arXiv 2205.05198). Where activations are computed again, so many of one layer, and a state of each."""
    settings = job.settings
    positions = _rows_at_once(job) * settings.sequence_length
    layer = max(17 * model.hidden, sum(map(sum, model.linears)) // model.blocks + 4 * model.hidden)
    numbers = layer + model.blocks * model.hidden if settings.gradient_checkpointing else layer * model.blocks
    taught = model.blocks * model.hidden if settings.squarehead else 0
    logits = 0 if model.encoder else 5 * model.vocabulary
    return 4 * positions * (numbers + taught + logits)


def _rows_at_once(job: RecoverJob) -> int:
    """Of one forward pass of a process."""
    own = -(-job.settings.batch_size // launched())
    return min(own, job.settings.micro_batch or own)


def _advice(job: RecoverJob, total: int, taught: int, activations: int, weights: int) -> str:
    """The settings that would help, those that cost least first."""
    settings = job.settings
    large = activations > total // _SHARE
    found = []
    if large and _rows_at_once(job) > 1:
        found.append(f"set micro_batch below {_rows_at_once(job)}")
    if large and not settings.gradient_checkpointing:
        found.append("set gradient_checkpointing: true")
    if taught > total // _SHARE:
        found.append("set teacher: cached")
    if settings.adapter is None and not job.method.nested and weights > total // _SHARE:
        found.append("use method lora")
    return ", ".join([*found, "or use a machine with more"] if found else ["use a machine with more"])


def _seconds(job: RecoverJob, model: Counted, teacher: Counted, speed: Speed, device: torch.device) -> float:
    """At most: it may end early. Two operations a weight and token for a forward pass, as many for the derivatives by activations, and by
    weights, those that change by an adapter too; a teacher has forward passes alone. The processes that were launched share it."""
    settings = job.settings
    rate = speed.single if device.type == "cpu" and settings.precision != "bfloat16" else max(speed.own, speed.single)
    forward, backward = 2.0 * model.total, 4.0 * model.total
    if settings.gradient_checkpointing:
        backward += 2.0 * model.inside
    asked = bool(settings.kl or settings.squarehead)
    lesson = 2.0 * teacher.total if asked else 0.0
    taught = lesson if settings.teacher == "memory" else 0.0
    trained = settings.steps * settings.batch_size * settings.sequence_length
    looks = settings.steps // settings.evaluate_every + 1
    measured = looks * held_out(settings.samples) * settings.sequence_length
    total = trained * (forward + backward + taught) + measured * (forward + taught)
    total /= launched()
    if asked and settings.teacher == "cached":
        total += settings.samples * settings.sequence_length * lesson
    return total / rate
