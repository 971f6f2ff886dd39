"""Training loop shared by drafts and recovery: student, data, loss and held-out goal, through accelerate; resumable to the bit.

The same loop runs on one CPU, in several processes and on GPUs. Every process holds the whole student and takes its rows of every step;
the loss is a mean over the trained positions of the whole step, so that results depend on the number of processes by rounding only.
"""

from __future__ import annotations

import math
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import nn

from compress.core.progress import Reporter
from compress.distill.train import checkpoint
from compress.distill.train.data import Batch, Source, TextRows, mix
from compress.distill.train.options import TrainOptions
from runtime.errors import CompressError, RequestError

if TYPE_CHECKING:
    from accelerate import Accelerator

HELD_OUT_ROWS = 4  # of one forward pass
_EXPLODED = 10.0  # times the loss of before the first step, or the least that is worth a word
_SLIGHT = 0.05
_SHARDED = ("FSDP", "DEEPSPEED", "MEGATRON_LM", "TP")
Sums = dict[str, tuple[float, float]]  # {what is measured: (sum over positions, positions)}


@dataclass(frozen=True)
class Goal:
    """The held-out measure that decides which weights are best.

    Attributes:
        name: of `Learner.measure`.
        larger: more of it is better; else less is.
        relative: a gain (`TrainOptions.gain`) is a share of the value before, else absolute.
    """

    name: str
    larger: bool
    relative: bool = False

    def better(self, value: float, than: float, gain: float = 0.0) -> bool:
        """Whether a value is better than another by more than `gain`. NaN is never, and every number is better than NaN."""
        if math.isnan(than):
            return not math.isnan(value)
        least = gain * abs(than) if self.relative else gain
        return value > than + least if self.larger else value < than - least


class Learner(Protocol):
    """The student: a module whose parameters that ask for gradients are float32.

    Attributes:
        phase: name of its training.
        goal: decides which weights are best.
        forgiving: a training that diverges ends with the best weights so far; else it fails.
    """

    phase: str
    goal: Goal
    forgiving: bool

    def __call__(self, batch: Batch, targets: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """Sum of weighted losses, and of the weights; targets as the teacher gives them, None without one."""

    def measure(self, batch: Batch, targets: Any) -> Sums:
        """What is measured on held-out rows; targets as the judge gives them."""

    def describe_means(self, means: dict[str, float]) -> str:
        """What was measured, for people."""

    def describe(self) -> dict[str, Any]:
        """What is trained and how, JSON-able; equal for runs that may resume from each other."""


class Guide(Protocol):
    """A teacher or a judge.

    Attributes:
        facts: what decides its targets, JSON-able.
    """

    @property
    def facts(self) -> dict[str, Any]:
        """Settings that decide the targets, JSON-able."""

    def targets(self, batch: Batch) -> Any:
        """What the student is compared with, on the batch's device, without gradients."""


class DivergedError(CompressError):
    """The loss is not finite any more."""


@dataclass
class Progression:
    """Progress of a run, without its weights; JSON-able."""

    step: int = 0
    best_step: int = 0
    losses: list[dict[str, float]] = field(default_factory=list)
    looks: list[dict[str, float]] = field(default_factory=list)
    running: list[float] = field(default_factory=list)

    def means(self, step: int) -> dict[str, float]:
        """What was measured after so many steps."""
        look = next(look for look in self.looks if look["step"] == step)
        return {key: value for key, value in look.items() if key != "step"}


@dataclass
class Trained:
    """Outcome of a run; the student holds the best weights.

    Attributes:
        steps: done, in all runs that went on from each other.
        best_step: steps done when the best weights were measured; 0: training did not help.
        before: what `Learner.measure` measures on the held-out rows, as means, of the untrained student.
        after: of the best weights.
        curve: {"train": [{"step", "loss", "learning_rate"}], "held_out": [{"step", what is measured}]}; losses are means over the steps
            since the entry before.
        ended: "steps", "patience" or "diverged".
    """

    steps: int
    best_step: int
    before: dict[str, float]
    after: dict[str, float]
    curve: dict[str, list[dict[str, float]]]
    ended: str

    def facts(self) -> dict[str, Any]:
        """For the report, JSON-able. JSON has no NaN and no infinity, which is where trainings that diverge end: "before" and "after" leave
        out what was not measured as a number, the curve has None in its place."""
        finite = {
            when: {name: value for name, value in means.items() if math.isfinite(value)}
            for when, means in (("before", self.before), ("after", self.after))
        }
        curve = {
            name: [{key: value if math.isfinite(value) else None for key, value in entry.items()} for entry in entries]
            for name, entries in self.curve.items()
        }
        return {"steps": self.steps, "best_step": self.best_step, **finite, "curve": curve, "ended": self.ended}


@dataclass
class Training:
    """One run; every process makes it with equal arguments (`accelerate launch`, `torchrun`).

    Attributes:
        student: a `Learner`; it is moved to the device.
        source: the rows.
        teacher: gives targets; None: the loss has none.
        held_out: rows that are not trained on; the student's goal on them decides what is best and when to stop.
        judge: gives the targets of `Learner.measure`; the teacher, as a rule.
        directory: for checkpoints, of this run alone; None: none are written. The run goes on from the newest that it finds there; on
            one CPU the result is then that of a run that was never interrupted, to the bit.
        accelerator: an `accelerate.Accelerator`; None: a new one, on `device` or on a GPU if there is one.
        device: torch.device where a single process trains; None: the accelerator's. Several have the devices that they were launched for.
        progress: who is told; a `compress.core.progress.Reporter` will do.

    Raises:
        RequestError: what cannot be trained, or a checkpoint of another run. CompressError: the loss is no longer finite.
    """

    student: Any
    source: Source
    teacher: Guide | None
    held_out: TextRows
    judge: Guide | None
    options: TrainOptions = field(default_factory=TrainOptions)
    directory: Path | None = None
    accelerator: Any = None
    device: Any = None
    progress: Reporter | None = None

    def run(self) -> Trained:
        """Train until the goal no longer improves, and leave the student with its best weights."""
        if self.accelerator is None:
            from accelerate import Accelerator

            self.accelerator = Accelerator(cpu=self.device is not None and self.device.type == "cpu")
        self._check()
        if self.device is None or self.accelerator.num_processes > 1:
            self.device = self.accelerator.device
        with torch.random.fork_rng(devices=[self.device] if self.device.type == "cuda" else []):
            self._begin(self.accelerator)
            ended = self._steps()
        at = self.at
        return Trained(
            at.step, at.best_step, at.means(0), at.means(at.best_step), {"train": at.losses, "held_out": at.looks}, ended
        )  # fmt: skip

    def _check(self) -> None:
        """RequestError where anything could not be trained."""
        kind = str(self.accelerator.distributed_type.value)
        if kind in _SHARDED:
            raise RequestError(f"models are trained whole in every process; {kind} shards them, launch without it")
        weights = checkpoint.trained_weights(self.student)
        if not weights:
            raise RequestError("no weight asks for a gradient: all are frozen")
        odd = next((name for name, weight in weights.items() if weight.dtype != torch.float32), None)
        if odd is not None:
            dtype = str(weights[odd].dtype).removeprefix("torch.")
            raise RequestError(f"weight {odd} is {dtype}; what is trained is float32")

    def _begin(self, accelerator: Accelerator) -> None:
        """Place the student, make the optimizer and go on from the newest checkpoint."""
        options, self.student = self.options, self.student.to(self.device)
        self.settings = {
            "options": options.describe(), "student": self.student.describe(), "source": self.source.describe(),
            "held_out": self.held_out.describe(), "teacher": None if self.teacher is None else self.teacher.facts,
        }  # fmt: skip
        weights = checkpoint.trained_weights(self.student).values()
        groups = [
            {"params": [p for p in weights if p.dim() > 1], "weight_decay": options.weight_decay},
            {"params": [p for p in weights if p.dim() <= 1], "weight_decay": 0.0},
        ]
        self.adamw = torch.optim.AdamW(
            [group for group in groups if group["params"]], lr=options.learning_rate, betas=options.betas
        )
        self.schedule = torch.optim.lr_scheduler.LambdaLR(self.adamw, options.rate)
        # Not placed by accelerate, which in a single process knows one device only: the first of the machine.
        self.wrapped, self.optimizer = accelerator.prepare(self.student, self.adamw, device_placement=[False, False])
        self.student = accelerator.unwrap_model(self.wrapped)
        self.weights: dict[str, nn.Parameter] = checkpoint.trained_weights(self.student)
        self.best: checkpoint.State = {}
        self.at = Progression()
        found = checkpoint.latest(self.directory, self.settings) if self.directory else None
        if found is None:
            return
        facts, tensors = found
        checkpoint.restore(self.weights, tensors["weights"])
        checkpoint.restore_optimizer(self.adamw, self.weights, tensors["optimizer"])
        self.best = tensors["best"]
        self.at = Progression(**{key: value for key, value in facts.items() if key != "settings"})
        self.schedule.last_epoch = self.at.step
        for group in self.adamw.param_groups:
            group["lr"] = options.learning_rate * options.rate(self.at.step)

    def _steps(self) -> str:
        """Train; returns why it ended."""
        options, at = self.options, self.at
        if self._reporting:
            self._reporting.phase(self.student.phase, -(-(options.steps - at.step) // options.evaluate_every))
        if not at.looks:
            self._look()
        ended = "patience" if self._settled() else "steps"
        self.wrapped.train()
        while at.step < options.steps and ended == "steps":
            try:
                at.running.append(self.update(at.step))
            except DivergedError:
                if not self.student.forgiving:
                    raise
                ended = "diverged"
                break
            at.step += 1
            last = at.step == options.steps
            if at.step % options.evaluate_every == 0 or last:
                self._look()
                ended = "diverged" if self._exploded() else "patience" if self._settled() else "steps"
            if ended != "diverged" and (at.step % options.checkpoint_every == 0 or last or ended == "patience"):
                self._save()
        checkpoint.restore(self.weights, self.best)
        self.student.eval()
        return ended

    def update(self, step: int) -> float:
        """One update of the weights; the mean loss."""
        options, accelerator = self.options, self.accelerator
        batch = self._rows(step)
        torch.manual_seed(mix(options.seed, step, accelerator.process_index))  # of dropout
        total = torch.zeros(2, dtype=torch.float64, device=self.device)
        parts = batch.split(options.micro_batch or len(batch))
        for number, part in enumerate(parts):
            last = number == len(parts) - 1
            with nullcontext() if last else accelerator.no_sync(self.wrapped):
                targets = None if self.teacher is None else self.teacher.targets(part)
                with self._autocast():
                    loss, weight = self.wrapped(part, targets)
                accelerator.backward(loss)
            total += torch.stack([loss.detach(), weight.detach()]).double()
        total = accelerator.reduce(total, "sum")
        mean = float(total[0]) / max(float(total[1]), 1e-12)
        if not math.isfinite(mean):
            raise DivergedError(f"training diverged: the loss of step {step + 1} is {mean}; lower the learning rate")
        if float(total[1]) > 0:  # sequences that the draft writes itself may all have ended at once
            # Gradients are means over the processes, of sums over positions.
            scale = accelerator.num_processes / float(total[1])
            for parameter in self.weights.values():
                if parameter.grad is not None:
                    parameter.grad.mul_(scale)
            accelerator.clip_grad_norm_(list(self.weights.values()), options.clip)
            self.optimizer.step()
        self.schedule.step()
        self.optimizer.zero_grad()
        return mean

    def measure(self) -> dict[str, float]:
        """Means over the held-out rows."""
        accelerator = self.accelerator
        count, index = accelerator.num_processes, accelerator.process_index
        sums: Sums = {}
        self.wrapped.eval()
        own = list(range(index, len(self.held_out), count))
        # A process without rows of its own still has to say what it measures.
        for start in range(0, max(1, len(own)), HELD_OUT_ROWS):
            rows = own[start : start + HELD_OUT_ROWS] or [0]
            part = self.held_out.batch(rows, [0] * len(rows)).to(self.device)
            found = self.student.measure(part, None if self.judge is None else self.judge.targets(part))
            add_sums(sums, found if own else dict.fromkeys(found, (0.0, 0.0)))
        self.wrapped.train()
        table = torch.tensor([sums[name] for name in sorted(sums)], dtype=torch.float64, device=self.device)
        table = accelerator.reduce(table, "sum")
        return {name: row[0] / max(row[1], 1.0) for name, row in zip(sorted(sums), table.tolist(), strict=True)}

    @property
    def _reporting(self) -> Reporter | None:
        return self.progress if self.accelerator.is_main_process else None

    def _rows(self, step: int) -> Batch:
        """This process's rows of a step."""
        options, count = self.options, len(self.source)
        share = options.batch // self.accelerator.num_processes
        first = self.accelerator.process_index * share
        slots = range(first, first + share)
        places = (divmod(step * options.batch + slot, count) for slot in slots)
        rows = [int(permutation(count, options.seed, epoch)[place]) for epoch, place in places]
        seeds = [mix(options.seed, step, slot, 1) for slot in slots]
        return self.source.batch(rows, seeds).to(self.device)

    def _look(self) -> None:
        """Measure the held-out rows; keep the weights where they are the best so far."""
        means, at, goal = self.measure(), self.at, self.student.goal
        if at.running:
            rate = float(self.schedule.get_last_lr()[0])
            at.losses.append({"step": at.step, "loss": math.fsum(at.running) / len(at.running), "learning_rate": rate})
            at.running = []
        if not at.looks or goal.better(means[goal.name], at.means(at.best_step)[goal.name]):
            at.best_step = at.step
            self.best = checkpoint.copied(self.weights)
        at.looks.append({"step": at.step, **means})
        if self._reporting and at.losses:
            told = self.student.describe_means(means)
            self._reporting.tracking.log({"training": at.losses[-1], "held_out": means})
            self._reporting.step(f"step {at.step}: loss {at.losses[-1]['loss']:.4f}, {told}")

    def _settled(self) -> bool:
        """Whether the last measurements gained nothing."""
        patience, looks = self.options.patience, self.at.looks
        if patience is None or len(looks) <= patience:
            return False
        goal = self.student.goal
        best = max if goal.larger else min
        before, after = (best(look[goal.name] for look in part) for part in (looks[:-patience], looks[-patience:]))
        return not goal.better(after, before, self.options.gain)

    def _exploded(self) -> bool:
        """Whether the held-out loss has grown so much that the training cannot recover."""
        goal, looks = self.student.goal, self.at.looks
        if not self.student.forgiving or goal.larger:
            return False
        last, first = looks[-1][goal.name], looks[0][goal.name]
        return not math.isfinite(last) or last > _EXPLODED * max(first, _SLIGHT)

    def _save(self) -> None:
        if self.directory is not None and self.accelerator.is_main_process:
            state = checkpoint.optimizer_state(self.adamw, self.weights)
            facts = {"settings": self.settings, **asdict(self.at)}
            checkpoint.save(
                self.directory, facts, weights=checkpoint.copied(self.weights), optimizer=state, best=self.best
            )
        self.accelerator.wait_for_everyone()

    def _autocast(self) -> AbstractContextManager[Any]:
        on_gpu = self.device.type == "cuda" and torch.cuda.is_bf16_supported()
        if self.options.precision == "float32" or (self.options.precision == "auto" and not on_gpu):
            return nullcontext()
        return torch.autocast(self.device.type, dtype=torch.bfloat16)


def add_sums(sums: Sums, found: Sums) -> None:
    """Add what was measured of some positions to what was of others."""
    for name, (value, count) in found.items():
        before = sums.get(name, (0.0, 0.0))
        sums[name] = (before[0] + value, before[1] + count)


@lru_cache(maxsize=1)
def permutation(rows: int, seed: int, epoch: int) -> torch.Tensor:
    """The rows of an epoch, every one once, in an order of its own: int64 `[rows]`."""
    return torch.randperm(rows, generator=torch.Generator().manual_seed(mix(seed, epoch, 2)))
