"""A sweep from its first trial to its last: propose, run, record, measure speed, keep what is worth keeping."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from rich.console import Console

from compress.core.files import disk_errors, write_json, write_text
from compress.core.units import duration
from compress.evaluate.speed import SpeedRequest, run_isolated
from compress.recipe import Recipe, locate_model
from compress.sweeps.base import BaseRecipe
from compress.sweeps.directory import SweepDirectory, read, recorded
from compress.sweeps.executors import Executor, choose
from compress.sweeps.labels import Labels
from compress.sweeps.metrics import METRICS, of_speed
from compress.sweeps.models import SpeedConfig, Sweep
from compress.sweeps.prepare import first_recipe, identity
from compress.sweeps.reading import load_sweep
from compress.sweeps.records import Trial, kept
from compress.sweeps.results import summary, write_results
from compress.sweeps.search import Grid, Study, open_search
from compress.sweeps.trial import finite
from compress.sweeps.views import write_views
from runtime.errors import CompressError, RequestError
from runtime.system.memory import free_bytes

# Speed of finished trials: measured apart, one artifact at a time, while no trial runs.


def time_trial(trial: Trial, artifact: Path, config: SpeedConfig, device: str) -> None:
    """Measure the trial's artifact in a process of its own, and note in the trial what was found, or why nothing was."""
    try:
        trial.metrics |= measure(str(artifact), config, device)
        trial.speed_error = None
    except CompressError as error:
        trial.speed_error = str(error)


def measure(model: str, config: SpeedConfig, device: str) -> dict[str, float | None]:
    """Speeds of an artifact or a checkpoint, by the names of `METRICS`."""
    shape = (config.prompt_tokens, config.new_tokens, config.batch_size, config.repeat)
    options = {"device": device, "threads": config.threads, "kernels": config.kernels}
    return finite(of_speed(run_isolated(SpeedRequest(model, "runtime", *shape, options=options))))


def of_source(
    file: Path, model: Callable[[], Path], config: SpeedConfig, device: str, warn: Callable[[str], None]
) -> dict[str, float | None]:
    """Speeds of the model that is compressed, measured once; empty where they cannot be measured, which `warn` is told.

    Args:
        file: keeps what was found, or under `error` why nothing was.
    """
    if not file.is_file():
        try:
            write_json(file, measure(str(model()), config, device))
        except CompressError as error:
            write_json(file, {"error": str(error)})
            warn(f"the speed of the model itself was not measured: {error}")
    return {name: value for name, value in read(file).items() if name != "error"}


# What a sweep says on stderr while it works: a line a trial.

_OFTEN = 10.0  # seconds between lines on what is checked


class Talk:
    """`quiet` keeps it to trials that fail."""

    def __init__(self, quiet: bool) -> None:
        self._console = Console(stderr=True, quiet=quiet)
        self._errors = Console(stderr=True)
        self._total = self._done = 0
        self._next = time.monotonic() + _OFTEN

    def checking(self, done: int, total: int) -> None:
        """How many points are checked; says it now and then, where there are so many that one wonders."""
        if time.monotonic() >= self._next:
            self._next = time.monotonic() + _OFTEN
            self._print(self._console, f"checked {done} of {total} combinations")

    def begin(self, total: int, done: int, where: str) -> None:
        """How much there is to do."""
        self._total, self._done = max(total, done), done
        before = f", {done} of them done" if done else ""
        self._print(self._console, f"{self._total} trials{before}: {where}")

    def settled(self, trial: Trial, sweep: Sweep) -> None:
        """What came of a trial."""
        self._done += 1
        head = f"[{self._done}/{self._total}] trial {trial.number}: {Labels(sweep).sentence(trial.values)}"
        if trial.status != "finished":
            self._print(self._errors, f"{head}: {trial.status}: {trial.error}", "yellow")
            return
        numbers = ", ".join(
            f"{name} {METRICS[name].show(trial.metrics[name])}"
            for name in sweep.file.objectives
            if trial.metrics.get(name) is not None
        )
        broken = "".join(f"; {sentence}" for sentence in trial.limits)
        self._print(self._console, f"{head}: {numbers}{broken} ({duration(trial.seconds)})")

    def warn(self, sentence: str) -> None:
        """What does not end the sweep, and somebody should know."""
        self._print(self._errors, f"warning: {sentence}", "yellow")

    def timed(self, trial: Trial) -> None:
        """What came of measuring a trial's speed."""
        if trial.speed_error is not None:
            self._print(
                self._errors, f"  trial {trial.number}: its speed was not measured: {trial.speed_error}", "yellow"
            )
        else:
            speed = METRICS["decode_speed"].show(trial.metrics.get("decode_speed"))
            self._print(self._console, f"  trial {trial.number}: {speed} tokens/s")

    @staticmethod
    def _print(console: Console, line: str, style: str | None = None) -> None:
        console.print(line, style=style, highlight=False, markup=False, soft_wrap=True)


_SOURCE = "source.json"
MakeExecutor = Callable[[Sweep, SweepDirectory, str], Executor]


@dataclass
class SweepResult:
    """What a sweep gives back.

    Attributes:
        path: its directory.
        summary: the content of sweep.json: `trials`, `pareto` (numbers), `best` (number), `source`, ...
        files: what was written beside the trials.
    """

    path: Path
    summary: dict[str, Any]
    files: list[Path]

    @property
    def trials(self) -> list[dict[str, Any]]:
        return self.summary["trials"]


class AllFailedError(CompressError):
    """No trial of the sweep has finished. `result` is what `sweep` would have returned."""

    def __init__(self, message: str, result: SweepResult) -> None:
        super().__init__(message)
        self.result = result


def sweep(
    source: str | Path | Mapping[str, Any],
    *,
    model: str | Path | None = None,
    output: str | Path | None = None,
    set: Iterable[str] = (),
    jobs: int | None = None,
    resume: bool = False,
    overwrite: bool = False,
    retry: bool = False,
    device: str = "auto",
    max_memory: int | None = None,
    quiet: bool = False,
    executor: MakeExecutor = choose,
) -> SweepResult:
    """Carry out a sweep; see `compress.sweep`.

    Raises:
        RequestError: the request is wrong, or several processes were launched; nothing was run. AllFailedError: no trial has finished.
    """
    _refuse_launched()
    plan, base = load_sweep(source, model=model, output=output, set=set, jobs=jobs)
    search = open_search(plan)
    path = Path(plan.file.output) if plan.file.output else Path("out") / "sweeps" / plan.file.name
    talk = Talk(quiet)
    recipe = first_recipe(plan, base, search, device, recorded(path) if resume else (), talk.checking)
    directory = SweepDirectory(path, identity(plan, base, recipe, device), resume, overwrite)
    try:
        with disk_errors(f"writing to {path}"):
            return _Run(plan, base, search, recipe, directory, device, max_memory, talk).carry_out(executor, retry)
    finally:
        directory.close()


def _refuse_launched() -> None:
    from compress.core.processes import launched

    if launched() > 1:
        raise RequestError(
            f"a sweep runs in one process and starts its own, and a launcher has started {launched()} (WORLD_SIZE): give the command "
            "without the launcher, and say with jobs (or a section ray) how many trials run at a time"
        )


@dataclass
class _Run:
    sweep: Sweep
    base: BaseRecipe
    search: Grid | Study
    recipe: Recipe
    directory: SweepDirectory
    device: str
    max_memory: int | None
    talk: Talk

    def carry_out(self, executor: MakeExecutor, retry: bool) -> SweepResult:
        write_text(
            self.directory.path / "sweep.yaml",
            yaml.safe_dump(self.sweep.resolved(), sort_keys=False, allow_unicode=True),
        )
        for record in self.directory.damaged:
            self.talk.warn(f"{record} is damaged: the trial is run again")
        if retry:
            self._forget_failures()
        self._tidy()
        begin = time.monotonic()
        self._run_trials(executor)
        source = self._source()
        result = summary(self.sweep, self.directory, source, time.monotonic() - begin)
        files = write_results(result, self.directory.path)
        files += write_views(result, self.sweep, self.directory.path)
        done = SweepResult(self.directory.path, result, files)
        if not any(trial.status == "finished" for trial in self.directory.in_order):
            first = self.directory.in_order[0]
            raise AllFailedError(
                f"none of {len(self.directory.trials)} trials has finished; trial 0: {first.error}", done
            )
        return done

    # ------------------------------------------------------------ trials
    def _run_trials(self, make: MakeExecutor) -> None:
        waiting = [trial for trial in self.directory.in_order if not trial.done]
        done = len(self.directory.trials) - len(waiting)
        if done and not waiting and len(self.directory.trials) >= self.search.total:
            self._time_those_left()
            return
        executor = make(self.sweep, self.directory, self.device)
        self.talk.begin(self.search.total, done, executor.description)
        share = self._memory_each(executor.slots)
        running = 0
        try:
            while True:
                # Speed is measured with nothing beside it: what is finished waits for the rest of its round, and then is measured
                # before the next round begins.
                while running < executor.slots and not self._untimed():
                    trial = waiting.pop(0) if waiting else self._propose()
                    if trial is None:
                        break
                    if trial.status == "refused":
                        continue
                    executor.start(trial.number, self._job(trial, share))
                    running += 1
                if not running:
                    if self._untimed():
                        self._time_those_left()
                        continue
                    return
                for number, outcome in executor.wait():
                    running -= 1
                    trial = self.directory.trials[number]
                    for key, value in outcome.items():
                        setattr(trial, key, value)
                    self._settle(trial)
        finally:
            executor.close()

    def _propose(self) -> Trial | None:
        """The next trial, on record; one that the recipe refuses is settled already."""
        trial = self.search.propose(self.directory.in_order)
        if trial is None:
            return None
        try:
            self.base.at(trial.values)
        except CompressError as error:
            trial.status, trial.error = "refused", str(error)
            self._settle(trial)
        else:
            self.directory.record(trial)
        return trial

    def _memory_each(self, slots: int) -> int | None:
        """Bytes that one trial may take. Each makes its plan as if it were alone, so those beside each other are told their share."""
        if self.max_memory is not None:
            return self.max_memory // slots
        if slots == 1 or self.sweep.ray is not None:
            return None
        return free_bytes() // slots

    def _job(self, trial: Trial, max_memory: int | None) -> dict[str, Any]:
        return {
            "base": self.base.to_plain(),
            "values": trial.values,
            "output": str(self.directory.artifact(trial.number).absolute()),
            "log": str(self.directory.log(trial.number).absolute()),
            "directory": str(Path.cwd()),
            "max_memory": max_memory,
        }

    def _settle(self, trial: Trial) -> None:
        """What came of a trial is known."""
        self.directory.record(trial)
        self.talk.settled(trial, self.sweep)
        self._tidy()

    def _tidy(self) -> None:
        """Keep those artifacts that are asked for, and those whose speed is to be measured; tell the present state."""
        trials = self.directory.in_order
        untimed = {trial.number for trial in self._untimed()}
        settled = [trial for trial in trials if trial.done and trial.number not in untimed]
        self.directory.drop_artifacts(kept(settled, self.sweep) | untimed)
        write_results(summary(self.sweep, self.directory, self._source(measured=False), 0.0), self.directory.path)

    def _forget_failures(self) -> None:
        source = self.directory.work(_SOURCE)
        if source.is_file() and "error" in read(source):
            source.unlink()
        for trial in self.directory.in_order:
            if trial.status in ("failed", "refused"):
                self.directory.record(Trial(trial.number, trial.values, search=trial.search))
            elif trial.speed_error is not None and self.directory.artifact(trial.number).is_dir():
                trial.speed_error = None
                self.directory.record(trial)

    # ------------------------------------------------------------ speed and the source
    def _untimed(self) -> list[Trial]:
        """Finished trials whose speed is to be measured."""
        if self.sweep.speed is None:
            return []
        return [trial for trial in self.directory.in_order if trial.status == "finished" and not trial.timed]

    def _time_those_left(self) -> None:
        for trial in self._untimed():
            assert self.sweep.speed is not None
            time_trial(trial, self.directory.artifact(trial.number), self.sweep.speed, self.device)
            self.directory.record(trial)
            self.talk.timed(trial)
        self._tidy()

    def _source(self, measured: bool = True) -> dict[str, float | None]:
        """The numbers of the model that is compressed: the trials have measured its quality; its speed is measured once, if `measured`."""
        found: dict[str, float | None] = {}
        for trial in self.directory.in_order:
            found = {**trial.source, **found}
        if self.sweep.speed is None or not found:
            return found
        file = self.directory.work(_SOURCE)
        if not measured and not file.is_file():
            return found
        return found | of_source(file, lambda: locate_model(self.recipe), self.sweep.speed, self.device, self.talk.warn)
