"""Experiment trackers (`--report-to`): Weights & Biases, trackio and MLflow receive the metrics of a run.

Each library uses its own settings: offline with WANDB_MODE=offline, to a folder or database with MLFLOW_TRACKING_URI.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from itertools import islice
from typing import Any, Protocol

from runtime.config.messages import did_you_mean
from runtime.errors import RequestError, first_line

PROJECT = "compress"


class Tracker(Protocol):
    """One run of a tracking library, made from the imported library, the run's name and its configuration."""

    def __init__(self, library: Any, name: str, config: Mapping[str, Any]) -> None: ...

    def log(self, values: Mapping[str, float], step: int) -> None:
        """Record numbers."""

    def finish(self, failed: bool) -> None:
        """End the run."""


class WandbTracker(Tracker):
    """A run of Weights & Biases, or of trackio, which has the same calls."""

    def __init__(self, library: Any, name: str, config: Mapping[str, Any]) -> None:
        self._run = library.init(project=PROJECT, name=name, config=dict(config))

    def log(self, values: Mapping[str, float], step: int) -> None:
        self._run.log(dict(values), step=step)

    def finish(self, failed: bool) -> None:
        self._run.finish()


class MlflowTracker(Tracker):
    """A run of MLflow."""

    _MOST = 100  # parameters per call

    def __init__(self, library: Any, name: str, config: Mapping[str, Any]) -> None:
        self._library = library
        library.set_experiment(PROJECT)
        library.start_run(run_name=name)
        items = iter(_flat(config).items())
        while some := dict(islice(items, self._MOST)):
            library.log_params(some)

    def log(self, values: Mapping[str, float], step: int) -> None:
        self._library.log_metrics(dict(values), step=step)

    def finish(self, failed: bool) -> None:
        self._library.end_run("FAILED" if failed else "FINISHED")


TRACKERS: dict[str, type[Tracker]] = {"wandb": WandbTracker, "mlflow": MlflowTracker, "trackio": WandbTracker}


class Tracking:
    """Metrics of a run, logged to a tracker. An error of the library is a warning, after which nothing more is logged.

    Args:
        report_to: name of a library; None: nothing is logged.
        name, config: of the run.
        warn: called with the warning.
    """

    def __init__(
        self, report_to: str | None, name: str, config: Mapping[str, Any], warn: Callable[[str], None]
    ) -> None:
        self._library, self._warn, self._step = report_to, warn, 0
        self._tracker: Tracker | None = None
        if report_to is not None:
            self._call(lambda: TRACKERS[report_to](importlib.import_module(report_to), name, config))

    def log(self, values: Mapping[str, Any]) -> None:
        """Record the finite numbers of nested `values`, `{"a": {"b": 1}}` as `a/b`. Each call is one step, because libraries want steps to
        increase, and training steps, blocks and trials each count from 0."""
        tracker, step = self._tracker, self._step
        found = {key: value for key, value in _flat(values, "/").items() if _is_number(value)}
        if tracker is not None and found:
            self._call(lambda: tracker.log(found, step))
            self._step += 1

    def finish(self, failed: bool = False) -> None:
        """End the run."""
        tracker = self._tracker
        if tracker is not None:
            self._call(lambda: tracker.finish(failed))
            self._tracker = None

    def _call(self, call: Callable[[], Tracker | None]) -> None:
        try:
            made = call()
        except Exception as error:  # libraries raise anything; a run must survive it
            self._tracker = None
            self._warn(f"logging to {self._library} stopped: {type(error).__name__}: {first_line(error)}")
        else:
            self._tracker = made or self._tracker


@contextmanager
def tracked(tracking: Tracking) -> Iterator[Tracking]:
    """End the tracker's run with the context, as failed if an error leaves it."""
    try:
        yield tracking
    except BaseException:
        tracking.finish(failed=True)
        raise
    tracking.finish()


def check_tracker(report_to: str | None) -> None:
    """RequestError if `report_to` is not a tracker, or its library is not installed."""
    if report_to is None:
        return
    if report_to not in TRACKERS:
        text = f"--report-to: there is no tracker {report_to!r}{did_you_mean(report_to, TRACKERS)}"
        raise RequestError(f"{text}; allowed: {', '.join(TRACKERS)}")
    try:
        importlib.import_module(report_to)
    except ImportError as error:
        if error.name == report_to:
            raise RequestError(f"--report-to {report_to}: not installed; run: pip install {report_to}") from None
        raise RequestError(f"--report-to {report_to}: cannot be imported: {first_line(error)}") from None


def _flat(values: Mapping[str, Any], between: str = ".", before: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, list) and any(isinstance(one, Mapping) for one in value):
            value = {str(number): one for number, one in enumerate(value)}
        if isinstance(value, Mapping):
            found |= _flat(value, between, f"{before}{key}{between}")
        else:
            found[f"{before}{key}"] = value
    return found


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
