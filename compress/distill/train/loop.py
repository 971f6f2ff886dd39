"""The steps of a training run: what `train` goes through in every process, and what it goes on from when it is resumed."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch

from compress.distill.train import checkpoint
from compress.distill.train.data import Batch, Source, TextRows, mix
from compress.distill.train.options import TrainOptions
from compress.kv_cache.statistics import Progress
from runtime.errors import CompressError

if TYPE_CHECKING:
    from accelerate import Accelerator

HELD_OUT_ROWS = 4  # of one forward pass
_EXPLODED = 10.0  # times the loss of before the first step, or the least that is worth a word
_SLIGHT = 0.05
Sums = dict[str, tuple[float, float]]  # {what is measured: (sum over positions, positions)}


@dataclass(frozen=True)
class Goal:
    """What decides on held-out rows which weights are best.

    Attributes:
        name: of `Learner.look`.
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
    """What is trained: a module whose parameters that ask for gradients are float32.

    Attributes:
        phase: what its training is called.
        goal: what is best.
        forgiving: a training that diverges ends with the best weights so far; else it fails.
    """

    phase: str
    goal: Goal
    forgiving: bool

    def targets(self, teacher: Any, batch: Batch) -> Any:
        """What the teacher (None: there is none) says of a batch."""

    def __call__(self, batch: Batch, targets: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """Sum of weighted losses, and of the weights."""

    def look(self, batch: Batch, judge: Any) -> Sums:
        """What is measured on held-out rows."""

    def told(self, means: dict[str, float]) -> str:
        """What was measured, for people."""

    def describe(self) -> dict[str, Any]:
        """What is trained and how, as plain data; equal for runs that go on from each other."""


class DivergedError(CompressError):
    """The loss is no number any more."""


@dataclass
class Standing:
    """Where a run is, besides its weights."""

    step: int = 0
    best_step: int = 0
    losses: list[dict[str, float]] = field(default_factory=list)
    looks: list[dict[str, float]] = field(default_factory=list)
    running: list[float] = field(default_factory=list)

    @property
    def held_out(self) -> list[dict[str, float]]:
        return [{key: value for key, value in look.items() if key != "step"} for look in self.looks]

    @property
    def best(self) -> dict[str, float]:
        return next(
            values for look, values in zip(self.looks, self.held_out, strict=True) if look["step"] == self.best_step
        )

    def curve(self) -> dict[str, list[dict[str, float]]]:
        return {"train": self.losses, "held_out": self.looks}


class Run:
    """A run as one process sees it; the arguments are those of `train`, checked.

    Attributes:
        device: where this process computes.
        settings: what a checkpoint must have been written with to go on from it.
        weights: those that are trained, by name.
        best_weights: a copy of the best so far.
        standing: where the run is.
    """

    def __init__(
        self,
        student: Any,
        source: Source,
        teacher: Any,
        held_out: TextRows,
        judge: Any,
        options: TrainOptions,
        accelerator: Accelerator,
        directory: Path | None,
        progress: Progress | None,
        device: torch.device,
    ) -> None:
        self.device = device
        self.source, self.teacher, self.held_out, self.judge = source, teacher, held_out, judge
        self.options, self.accelerator, self.directory = options, accelerator, directory
        self.progress = progress if accelerator.is_main_process else None
        self.settings = {
            "options": options.describe(), "student": student.describe(), "source": source.describe(),
            "held_out": held_out.describe(),
            "teacher": getattr(teacher, "facts", None) or getattr(teacher, "fingerprint", None),
        }  # fmt: skip
        student.to(device)
        weights = checkpoint.trained_weights(student)
        groups = [
            {"params": [p for p in weights.values() if p.dim() > 1], "weight_decay": options.weight_decay},
            {"params": [p for p in weights.values() if p.dim() <= 1], "weight_decay": 0.0},
        ]
        optimizer = torch.optim.AdamW(
            [group for group in groups if group["params"]], lr=options.learning_rate, betas=options.betas
        )
        self.schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, options.rate)
        # Not placed by accelerate, which in a single process knows one device only: the first of the machine.
        self.wrapped, self.optimizer = accelerator.prepare(student, optimizer, device_placement=[False, False])
        self.plain_optimizer = optimizer
        self.student: Learner = accelerator.unwrap_model(self.wrapped)
        self.weights = checkpoint.trained_weights(accelerator.unwrap_model(self.wrapped))
        self.best_weights: checkpoint.State = {}
        self.order = Order(len(source), options)
        self.standing = Standing()

    def resume(self) -> None:
        """Go on from the newest checkpoint, if there is one; RequestError where it is of another run."""
        assert self.directory is not None
        found = checkpoint.latest(self.directory, self.settings)
        if found is None:
            return
        checkpoint.restore(self.weights, found.weights)
        checkpoint.restore_optimizer(self.plain_optimizer, self.weights, found.optimizer)
        self.best_weights = found.best
        facts = found.facts
        self.standing = Standing(found.step, facts["best_step"], facts["losses"], facts["looks"], facts["running"])
        self.schedule.last_epoch = found.step
        for group in self.plain_optimizer.param_groups:
            group["lr"] = self.options.learning_rate * self.options.rate(found.step)

    def go(self) -> str:
        """Train; why it ended."""
        options, standing = self.options, self.standing
        if self.progress is not None:
            self.progress.phase(self.student.phase, -(-(options.steps - standing.step) // options.evaluate_every))
        if not standing.looks:
            self._look()
        ended = "patience" if self._settled() else "steps"
        self.wrapped.train()
        while standing.step < options.steps and ended != "patience":
            try:
                standing.running.append(self._step(standing.step))
            except DivergedError:
                if not self.student.forgiving:
                    raise
                ended = "diverged"
                break
            standing.step += 1
            last = standing.step == options.steps
            if standing.step % options.evaluate_every == 0 or last:
                self._look()
                ended = "patience" if self._settled() else "steps"
                if self._exploded():
                    ended = "diverged"
                    break
            if standing.step % options.checkpoint_every == 0 or last or ended == "patience":
                self._save()
        checkpoint.restore(self.weights, self.best_weights)
        self.accelerator.unwrap_model(self.wrapped).eval()
        return ended

    def _step(self, step: int) -> float:
        """One update; the mean loss."""
        options, accelerator = self.options, self.accelerator
        batch = self._rows(step)
        torch.manual_seed(mix(options.seed, step, accelerator.process_index))  # of dropout
        total = torch.zeros(2, dtype=torch.float64, device=self.device)
        parts = batch.split(options.micro_batch or len(batch))
        for number, part in enumerate(parts):
            last = number == len(parts) - 1
            with nullcontext() if last else accelerator.no_sync(self.wrapped):
                targets = self.student.targets(self.teacher, part)
                with self._autocast():
                    loss, weight = self.wrapped(part, targets)
                accelerator.backward(loss)
            total += torch.stack([loss.detach(), weight.detach()]).double()
        total = accelerator.reduce(total, "sum")
        mean = float(total[0]) / max(float(total[1]), 1e-12)
        if not math.isfinite(mean):
            raise DivergedError(f"training diverged: the loss of step {step + 1} is {mean}; lower the learning rate")
        if float(total[1]) > 0:  # texts of the draft's own may all have ended at once
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

    def _rows(self, step: int) -> Batch:
        """This process's rows of a step."""
        count, index = self.accelerator.num_processes, self.accelerator.process_index
        share = self.options.batch // count
        slots = range(index * share, (index + 1) * share)
        seeds = [mix(self.options.seed, step, slot, 1) for slot in slots]
        return self.source.batch(self.order.rows(step, slots), seeds).to(self.device)

    def _look(self) -> None:
        """Measure the held-out rows; keep the weights where they are the best so far."""
        means, standing = self._measured(), self.standing
        if standing.running:
            rate = float(self.schedule.get_last_lr()[0])
            loss = math.fsum(standing.running) / len(standing.running)
            standing.losses.append({"step": standing.step, "loss": loss, "learning_rate": rate})
            standing.running = []
        goal = self.student.goal
        first = not standing.looks
        best = math.nan if first else standing.best[goal.name]
        standing.looks.append({"step": standing.step, **means})
        if first or goal.better(means[goal.name], best):
            standing.best_step = standing.step
            self.best_weights = checkpoint.copied(self.weights)
        if self.progress is not None and standing.losses:
            self.progress.step(
                f"step {standing.step}: loss {standing.losses[-1]['loss']:.4f}, {self.student.told(means)}"
            )

    def _measured(self) -> dict[str, float]:
        count, index = self.accelerator.num_processes, self.accelerator.process_index
        sums: Sums = {}
        self.wrapped.eval()
        own = list(range(index, len(self.held_out), count))
        # A process without rows of its own still has to say what it measures.
        for start in range(0, max(1, len(own)), HELD_OUT_ROWS):
            rows = own[start : start + HELD_OUT_ROWS] or [0]
            part = self.held_out.batch(rows, [0] * len(rows)).to(self.device)
            found = self.student.look(part, self.judge)
            for name, (value, number) in found.items():
                before = sums.get(name, (0.0, 0.0))
                sums[name] = (before[0] + value, before[1] + number) if own else (0.0, 0.0)
        self.wrapped.train()
        table = torch.tensor([sums[name] for name in sorted(sums)], dtype=torch.float64, device=self.device)
        table = self.accelerator.reduce(table, "sum")
        return {name: row[0] / max(row[1], 1.0) for name, row in zip(sorted(sums), table.tolist(), strict=True)}

    def _settled(self) -> bool:
        """Whether the last looks brought nothing."""
        patience, looks = self.options.patience, self.standing.looks
        if patience is None or len(looks) <= patience:
            return False
        goal = self.student.goal
        best = max if goal.larger else min
        before, after = (best(look[goal.name] for look in part) for part in (looks[:-patience], looks[-patience:]))
        return not goal.better(after, before, self.options.gain)

    def _exploded(self) -> bool:
        """Whether held-out rows say that the training has left where it could come back from."""
        goal, looks = self.student.goal, self.standing.looks
        if not self.student.forgiving or goal.larger:
            return False
        last, first = looks[-1][goal.name], looks[0][goal.name]
        return not math.isfinite(last) or last > _EXPLODED * max(first, _SLIGHT)

    def _save(self) -> None:
        if self.directory is not None and self.accelerator.is_main_process:
            standing = self.standing
            facts = {
                "settings": self.settings, "best_step": standing.best_step, "losses": standing.losses, "looks": standing.looks,
                "running": standing.running,
            }  # fmt: skip
            state = checkpoint.optimizer_state(self.plain_optimizer, self.weights)
            checkpoint.save(
                self.directory,
                checkpoint.Standing(standing.step, checkpoint.copied(self.weights), state, self.best_weights, facts),
            )
        self.accelerator.wait_for_everyone()

    def _autocast(self) -> AbstractContextManager[Any]:
        device, precision = self.device, self.options.precision
        if precision == "auto":
            precision = "bfloat16" if device.type == "cuda" and torch.cuda.is_bf16_supported() else "float32"
        if precision == "float32":
            return nullcontext()
        return torch.autocast(device.type, dtype=torch.bfloat16)


class Order:
    """Which rows each step has: every epoch all of them, in an order of its own."""

    def __init__(self, rows: int, options: TrainOptions) -> None:
        self.count, self.batch, self.seed = rows, options.batch, options.seed
        self._epoch, self._permutation = -1, torch.empty(0, dtype=torch.int64)

    def rows(self, step: int, slots: Sequence[int]) -> list[int]:
        return list(self._rows(step, slots))

    def _rows(self, step: int, slots: Sequence[int]) -> Iterator[int]:
        for slot in slots:
            epoch, place = divmod(step * self.batch + slot, self.count)
            if epoch != self._epoch:
                generator = torch.Generator().manual_seed(mix(self.seed, epoch, 2))
                self._epoch, self._permutation = epoch, torch.randperm(self.count, generator=generator)
            yield int(self._permutation[place])
