"""Loop of a sweep: propose trials, run them, record results, measure speed, keep the artifacts that are asked for."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from rich.console import Console

from compress.core.files import disk_errors, write_json, write_text
from compress.core.processes import launched
from compress.core.run_directory import remove
from compress.core.tracking import Tracking, check_tracker, tracked
from compress.core.units import duration
from compress.evaluate.speed import SpeedRequest, run_isolated
from compress.recipe import Recipe, locate_model
from compress.run.session import Session
from compress.run.session import identity as identity_of_run
from compress.sweeps.base import BaseRecipe
from compress.sweeps.directory import SweepDirectory, read, recorded
from compress.sweeps.executors import Executor
from compress.sweeps.fit import first_recipe
from compress.sweeps.labels import sentence
from compress.sweeps.metrics import METRICS, of_speed
from compress.sweeps.models import SpeedConfig, Sweep
from compress.sweeps.reading import load_sweep
from compress.sweeps.records import Trial, kept
from compress.sweeps.results import summary, write_results
from compress.sweeps.search import Grid, Study, open_search
from compress.sweeps.trial import finite
from compress.sweeps.views import write_views
from runtime.errors import CompressError, RequestError
from runtime.system.memory import free_bytes

# Speed of finished trials: measured apart, one artifact at a time, while no trial runs.


def measure(model: str, config: SpeedConfig, device: str) -> dict[str, float | None]:
    """Speeds of an artifact or a checkpoint in a process of its own, by the names of `METRICS`."""
    shape = config.model_dump(exclude={"threads", "kernels"})
    options = {"device": device, "threads": config.threads, "kernels": config.kernels}
    return finite(of_speed(run_isolated(SpeedRequest(model, options=options, **shape))))


def of_source(
    file: Path, model: Callable[[], Path], config: SpeedConfig, device: str, warn: Callable[[str], None]
) -> dict[str, float | None]:
    """Speeds of the original model, measured once; empty, after a warning, where they cannot be measured.

    Args:
        file: keeps the speeds, or under `error` why there are none.
    """
    if not file.is_file():
        try:
            write_json(file, measure(str(model()), config, device))
        except CompressError as error:
            write_json(file, {"error": str(error)})
            warn(f"the speed of the original model was not measured: {error}")
    return {name: value for name, value in read(file).items() if name != "error"}


class Talk:
    """Progress on stderr, a line per trial; `quiet`: only warnings and trials that fail."""

    def __init__(self, quiet: bool) -> None:
        self.tracking = Tracking(None, "", {}, self.warn)
        self._console = Console(stderr=True)
        self._quiet = quiet
        self._total = self._done = 0

    def begin(self, total: int, done: int, where: str) -> None:
        """The number of trials, and where they run."""
        self._total, self._done = max(total, done), done
        before = f", {done} of them done" if done else ""
        self.say(f"{self._total} trials{before}: {where}")

    def settled(self, trial: Trial, sweep: Sweep) -> None:
        """The result of a trial."""
        self._done += 1
        found = f"{trial.status}: {trial.error}"
        if trial.status == "finished":
            values = {name: trial.metrics.get(name) for name in sweep.file.objectives}
            numbers = [f"{name} {METRICS[name].show(value)}" for name, value in values.items() if value is not None]
            found = f"{'; '.join([', '.join(numbers), *trial.limits])} ({duration(trial.seconds)})"
        head = f"[{self._done}/{self._total}] trial {trial.number}: {sentence(trial.values)}"
        self.say(f"{head}: {found}", warning=trial.status != "finished")
        self.tracking.log({"trial": trial.number, "values": trial.values, **trial.metrics, "seconds": trial.seconds})

    def timed(self, trial: Trial) -> None:
        """The speed of a trial."""
        self.tracking.log({"trial": trial.number, **trial.metrics})
        speed = f"{METRICS['decode_speed'].show(trial.metrics.get('decode_speed'))} tokens/s"
        if trial.speed_error is not None:
            speed = f"its speed was not measured: {trial.speed_error}"
        self.say(f"  trial {trial.number}: {speed}", warning=trial.speed_error is not None)

    def warn(self, text: str) -> None:
        """A warning, which does not end the sweep."""
        self.say(f"warning: {text}", warning=True)

    def say(self, line: str, warning: bool = False) -> None:
        """Print a line."""
        if warning or not self._quiet:
            style = "yellow" if warning else None
            self._console.print(line, style=style, highlight=False, markup=False, soft_wrap=True)


_SOURCE = "source.json"
MakeExecutor = Callable[[Sweep, SweepDirectory, str], Executor]


@dataclass
class SweepResult:
    """Result of a sweep.

    Attributes:
        path: its directory.
        summary: the content of sweep.json: `trials`, `pareto` (numbers), `best` (number), `source`, ...
        files: written beside the trials.
    """

    path: Path
    summary: dict[str, Any]
    files: list[Path]

    @property
    def trials(self) -> list[dict[str, Any]]:
        """The trials of the summary."""
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
    report_to: str | None = None,
    executor: MakeExecutor | None = None,
) -> SweepResult:
    """Carry out a sweep; see `compress.sweep`.

    Raises:
        RequestError: the request is wrong, or several processes were launched; nothing was run. AllFailedError: no trial has finished.
    """
    if launched() > 1:
        raise RequestError(
            f"a sweep starts its own processes, but a launcher has started {launched()} (WORLD_SIZE): run the command without the "
            "launcher, and set the number of trials at a time by jobs or ray"
        )
    check_tracker(report_to)
    plan, base = load_sweep(source, model=model, output=output, set=set, jobs=jobs)
    search = open_search(plan)
    path = Path(plan.file.output) if plan.file.output else Path("out") / "sweeps" / plan.file.name
    recipe, unfit = first_recipe(plan, base, search, device, recorded(path) if resume else (), quiet)
    directory = SweepDirectory(path, identity(plan, base, recipe, device), resume, overwrite)
    try:
        talk = Talk(quiet)
        talk.tracking = Tracking(report_to, plan.file.name, plan.resolved(), talk.warn)
        with disk_errors(f"writing to {path}"), tracked(talk.tracking):
            run = _Run(plan, base, search, recipe, unfit, directory, device, max_memory, talk)
            return run.carry_out(executor or choose, retry)
    finally:
        directory.close()


def identity(sweep: Sweep, base: BaseRecipe, recipe: Recipe, device: str) -> dict[str, Any]:
    """Data that must be equal for a resume, or may only grow (`compress.sweeps.directory.check_continues`).

    Args:
        recipe: of some point.
    """
    session = Session.open(recipe, device)  # holds the checkpoints that its context reads
    found = identity_of_run(session.context)
    found["recipe"] = base.digest()
    if any(key.partition(".")[0] == "calibration" for key in sweep.vary):
        found.pop("calibration_text", None)
    return {
        "sweep": sweep.settled(),
        "vary": {key: values.plain() for key, values in sweep.vary.items()},
        "trials": None if sweep.file.search is None else sweep.file.search.trials,
        "base": found,
    }


def choose(sweep: Sweep, directory: SweepDirectory, device: str) -> Executor:
    """A Ray cluster where the sweep names one, else processes on this machine."""
    if sweep.file.ray is not None:
        from compress.sweeps.executors.ray_cluster import RayExecutor

        return RayExecutor(sweep.file.ray, device)
    from compress.sweeps.executors.processes import ProcessExecutor

    return ProcessExecutor(sweep.file.jobs, directory, device)


@dataclass
class _Run:
    sweep: Sweep
    base: BaseRecipe
    search: Grid | Study
    recipe: Recipe
    unfit: Mapping[str, str]
    directory: SweepDirectory
    device: str
    max_memory: int | None
    talk: Talk

    def carry_out(self, executor: MakeExecutor, retry: bool) -> SweepResult:
        path = self.directory.path
        write_text(path / "sweep.yaml", yaml.safe_dump(self.sweep.resolved(), sort_keys=False, allow_unicode=True))
        for record in self.directory.damaged:
            self.talk.warn(f"{record} is damaged: the trial runs again")
        if retry:
            self._forget_failures()
        self._tidy()
        if self.unfit:
            count = f"{len(self.unfit)} of {self.search.total}"
            self.talk.warn(
                f"{count} combinations do not fit the recipe or the model and are skipped; the table has the reasons"
            )
        begin = time.monotonic()
        self._run_trials(executor)
        result = summary(self.sweep, self.directory, self._source(), time.monotonic() - begin)
        done = SweepResult(path, result, write_results(result, path) + write_views(result, self.sweep, path))
        trials = self.directory.in_order
        if not any(trial.status == "finished" for trial in trials):
            raise AllFailedError(f"none of {len(trials)} trials has finished; trial 0: {trials[0].error}", done)
        return done

    def _run_trials(self, make: MakeExecutor) -> None:
        waiting = [trial for trial in self.directory.in_order if not trial.done]
        done = len(self.directory.trials) - len(waiting)
        if done and not waiting and len(self.directory.trials) >= self.search.total:
            self._time_trials()
            return
        executor = make(self.sweep, self.directory, self.device)
        self.talk.begin(self.search.total, done, executor.description)
        share = self._memory_each(executor.slots)
        running = 0
        try:
            while True:
                # Speed is measured while no trial runs: finished trials wait for the rest of their round and are measured before the
                # next round begins.
                while running < executor.slots and not self._untimed():
                    trial = waiting.pop(0) if waiting else self._propose()
                    if trial is None:
                        break
                    if trial.status != "refused":
                        executor.start(trial.number, self._job(trial, share))
                        running += 1
                if not running:
                    if not self._untimed():
                        return
                    self._time_trials()
                    continue
                for number, outcome in executor.wait():
                    running -= 1
                    trial = self.directory.trials[number]
                    vars(trial).update(outcome)
                    self._settle(trial)
        finally:
            executor.close()

    def _propose(self) -> Trial | None:
        """The next trial, on record; one that the recipe or, in a grid, the model refuses is settled already."""
        trial = self.search.propose(self.directory.in_order)
        if trial is None:
            return None
        error = self.unfit.get(trial.key)
        try:
            self.base.at(trial.values)
        except CompressError as refused:
            error = str(refused)
        if error is not None:
            trial.status, trial.error = "refused", error
            self._settle(trial)
        else:
            self.directory.record(trial)
        return trial

    def _memory_each(self, slots: int) -> int | None:
        """Bytes that one trial may take: each plans as if it were alone, so concurrent ones are given their share."""
        if self.max_memory is not None:
            return self.max_memory // slots
        return None if slots == 1 or self.sweep.file.ray is not None else free_bytes() // slots

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
        """Record and report a trial that has ended."""
        self.directory.record(trial)
        self.talk.settled(trial, self.sweep)
        self._tidy()

    def _tidy(self) -> None:
        """Keep the artifacts that are asked for and those whose speed is to be measured; write the present results."""
        untimed = {trial.number for trial in self._untimed()}
        settled = [trial for trial in self.directory.in_order if trial.done and trial.number not in untimed]
        wanted = kept(settled, self.sweep) | untimed
        for trial in self.directory.in_order:
            if trial.done and trial.number not in wanted:
                remove(self.directory.artifact(trial.number))
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

    def _untimed(self) -> list[Trial]:
        """Finished trials whose speed is to be measured."""
        if self.sweep.speed is None:
            return []
        return [trial for trial in self.directory.in_order if trial.status == "finished" and not trial.timed]

    def _time_trials(self) -> None:
        """Measure the speed of finished trials, and record it or why it could not be measured."""
        for trial in self._untimed():
            assert self.sweep.speed is not None
            try:
                trial.metrics |= measure(str(self.directory.artifact(trial.number)), self.sweep.speed, self.device)
            except CompressError as error:
                trial.speed_error = str(error)
            self.directory.record(trial)
            self.talk.timed(trial)
        self._tidy()

    def _source(self, measured: bool = True) -> dict[str, float | None]:
        """The numbers of the original model: quality from the trials; speed, if `measured`, by a measurement of its own."""
        found: dict[str, float | None] = {}
        for trial in self.directory.in_order:
            found = {**trial.source, **found}
        file = self.directory.work(_SOURCE)
        if self.sweep.speed is None or not found or not (measured or file.is_file()):
            return found
        return found | of_source(file, lambda: locate_model(self.recipe), self.sweep.speed, self.device, self.talk.warn)
