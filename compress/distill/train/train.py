"""Train a draft through accelerate: the same function on one CPU, in several processes, on GPUs; resumable, and repeatable to the bit."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from compress.distill.draft.student import Student
from compress.distill.train import checkpoint
from compress.distill.train.data import Source, TextRows
from compress.distill.train.loop import Run
from compress.distill.train.options import TrainOptions
from compress.distill.train.teacher import Teacher
from compress.distill.train.teacher_cache import TeacherCache
from compress.kv_cache.statistics import Progress
from runtime.errors import RequestError

if TYPE_CHECKING:
    from accelerate import Accelerator


@dataclass
class Trained:
    """What came of a run; the draft holds the best weights.

    Attributes:
        steps: done, in all runs that went on from each other.
        best_step: steps done when the best weights were looked at; 0: training did not help.
        before: what `Student.measure` measures on the held-out rows, as means, of the untrained draft.
        after: of the best weights.
        curve: {"train": [{"step", "loss", "learning_rate"}], "held_out": [{"step", what is measured}]}, JSON-able; losses are means
            over the steps since the entry before.
        ended: "steps", "patience" or "diverged".
        seconds: of this run.
    """

    steps: int
    best_step: int
    before: dict[str, float]
    after: dict[str, float]
    curve: dict[str, list[dict[str, float]]]
    ended: str
    seconds: float

    def facts(self) -> dict[str, Any]:
        """For the report, JSON-able. JSON has no NaN and no infinity, which is where trainings that diverge end: "before" and "after" leave
        out what was not measured as a number, the curve has None in its place."""
        curve = {
            name: [{key: value if math.isfinite(value) else None for key, value in entry.items()} for entry in entries]
            for name, entries in self.curve.items()
        }
        return {
            "steps": self.steps, "best_step": self.best_step, "before": _finite(self.before), "after": _finite(self.after), "curve": curve,
            "ended": self.ended, "seconds": round(self.seconds, 2),
        }  # fmt: skip


def _finite(means: dict[str, float]) -> dict[str, float]:
    return {name: value for name, value in means.items() if math.isfinite(value)}


def train(
    student: Student,
    source: Source,
    teacher: Teacher | TeacherCache | None,
    held_out: TextRows,
    judge: Teacher,
    options: TrainOptions | None = None,
    *,
    directory: str | Path | None = None,
    resume: bool = False,
    accelerator: Accelerator | None = None,
    device: torch.device | None = None,
    progress: Progress | None = None,
) -> Trained:
    """Train a student until its held-out acceptance no longer grows, and leave it with its best weights.

    Every process calls this with equal arguments (`accelerate launch`, `torchrun`, or a launcher of accelerate). Each holds the whole
    draft and takes its rows of every step; the loss is a mean over the trained positions of the whole step, so that results depend on
    how many processes there are by rounding only.

    Args:
        student: its trained weights float32. It is moved to the device.
        source: the rows.
        teacher: gives targets: as it runs, or from a cache of the rows of `source`. None: the objective has no teacher.
        held_out: rows that are not trained on; acceptance on them decides what is best and when to stop.
        judge: the target whose acceptance counts; the teacher, as a rule.
        options: None: the defaults.
        directory: for checkpoints, of this run alone; None: none are written.
        resume: go on from the newest checkpoint in `directory`, if there is one; on one CPU the result is then that of a run that was
            never interrupted, to the bit.
        accelerator: None: a new one, on a GPU if there is one.
        device: where a single process trains; None: the accelerator's. Several have the devices that they were launched for.
        progress: who is told; a `compress.core.progress.Reporter` will do.

    Raises:
        RequestError: arguments that do not go together. CompressError: the loss is no longer finite.
    """
    options = options or TrainOptions()
    if accelerator is None:
        from accelerate import Accelerator

        accelerator = Accelerator()
    place = None if directory is None else Path(directory)
    _check(student, source, teacher, held_out, judge, options, accelerator, place, resume)
    return run(student, source, teacher, held_out, judge, options, place, resume, accelerator, device, progress)


def run(
    learner: Any,
    source: Source,
    teacher: Any,
    held_out: TextRows,
    judge: Any,
    options: TrainOptions,
    directory: Path | None,
    resume: bool,
    accelerator: Accelerator,
    device: torch.device | None,
    progress: Progress | None,
) -> Trained:
    """Train a `Learner`; arguments as of `train`, checked."""
    began = time.perf_counter()
    if device is None or accelerator.num_processes > 1:
        device = accelerator.device
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        steps = Run(learner, source, teacher, held_out, judge, options, accelerator, directory, progress, device)
        if resume:
            steps.resume()
        ended = steps.go()
    standing = steps.standing
    return Trained(
        standing.step, standing.best_step, standing.held_out[0], standing.best, standing.curve(), ended, time.perf_counter() - began
    )  # fmt: skip


def _check(
    student: Student,
    source: Source,
    teacher: Teacher | TeacherCache | None,
    held_out: TextRows,
    judge: Teacher,
    options: TrainOptions,
    accelerator: Accelerator,
    directory: Path | None,
    resume: bool,
) -> None:
    check_run(student, options, accelerator, directory, resume)
    if teacher is None and student.objective.needs_teacher:
        raise RequestError(f"{student.objective.divergence} needs a teacher")
    for who in (teacher, judge):
        if isinstance(who, Teacher) and who.vocabulary != student.vocabulary:
            raise RequestError(
                f"the draft has a vocabulary of {student.vocabulary} and its target of {who.vocabulary}; both must have the same"
            )
    if isinstance(teacher, TeacherCache):
        teacher.check(source, student.width, student.kept)
    limit = getattr(student.draft.config.get_text_config(decoder=True), "max_position_embeddings", None)
    for what, rows in (("training rows", source), ("held-out rows", held_out)):
        if limit is not None and rows.length > limit:
            raise RequestError(f"{what} of {rows.length} tokens are more than the {limit} positions of the draft")
        if rows.largest >= student.vocabulary:
            raise RequestError(
                f"{what} have token id {rows.largest}, outside the draft's vocabulary of {student.vocabulary}"
            )
    if not bool(held_out.trained.any()):
        raise RequestError("held-out rows: no position of them counts")


def check_run(
    learner: Any, options: TrainOptions, accelerator: Accelerator, directory: Path | None, resume: bool
) -> None:
    """RequestError where anything that is trained could not be so."""
    kind = str(accelerator.distributed_type.value)
    if kind in ("FSDP", "DEEPSPEED", "MEGATRON_LM", "TP"):
        raise RequestError(f"models are trained whole in every process; {kind} shards them, launch without it")
    if options.batch % accelerator.num_processes:
        raise RequestError(
            f"a batch of {options.batch} rows cannot be shared by {accelerator.num_processes} processes; make it a multiple"
        )
    weights = checkpoint.trained_weights(learner)
    if not weights:
        raise RequestError("no weight asks for a gradient: all are frozen")
    odd = next((name for name, weight in weights.items() if weight.dtype != torch.float32), None)
    if odd is not None:
        raise RequestError(
            f"weight {odd} is {str(weights[odd].dtype).removeprefix('torch.')}; what is trained is float32"
        )
    if resume and directory is None:
        raise RequestError("nothing to resume: no directory for checkpoints is given")
    if directory is not None and not resume and checkpoint.is_begun(directory):
        raise RequestError(f"{directory} holds an unfinished training; resume it or remove it")
