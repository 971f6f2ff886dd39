"""Trials as tasks of a Ray cluster, or of a Ray that is started on this machine.

All machines need this package, and the folders of the one that starts the sweep under the same names: trials write into its directory.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from compress.sweeps.executors import Outcome, died, launcher_variables
from compress.sweeps.models import RayConfig
from compress.sweeps.trial import run_trial
from runtime.errors import RequestError
from runtime.system.distribution import how_to_install


class RayExecutor:
    """See `Executor`. Each trial is a task with a worker process of its own, which Ray does not restart."""

    def __init__(self, config: RayConfig, device: str) -> None:
        # A cluster started for a sweep sends no usage reports; for an existing one its owner decides.
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        try:
            import ray
        except ImportError as error:
            text = f"ray: Ray is not installed; {how_to_install('ray')}, or leave the section out to run trials as processes here"
            raise RequestError(text) from error
        self._ray: Any = ray
        self._config = config
        self._device = device
        self._running: dict[Any, tuple[int, str]] = {}
        self._started = not ray.is_initialized()
        if self._started:
            options: dict[str, Any] = {"include_dashboard": False} if config.address == "local" else {}
            try:
                ray.init(address=config.address, log_to_driver=False, configure_logging=False, **options)
            except (ConnectionError, OSError, RuntimeError, ValueError) as error:
                text = f"ray.address: no Ray cluster answers at {config.address!r}: {_first(error)}"
                raise RequestError(text) from error
        resources = ray.cluster_resources()
        cpus, gpus = resources.get("CPU", 0.0), resources.get("GPU", 0.0)
        fits = int(cpus // config.cpus)
        if config.gpus:
            fits = min(fits, int(gpus / config.gpus))
        if fits < 1:
            self.close()
            has = f"the cluster has {cpus:g} and {gpus:g}"
            raise RequestError(f"ray: a trial takes {config.cpus} CPUs and {config.gpus:g} GPUs, and {has}")
        self.slots = min(fits, config.at_once or fits)
        each = f"{config.cpus} CPU{'s' if config.cpus > 1 else ''} each"
        self.description = f"Ray at {config.address}, {self.slots} at a time, {each}"
        self.task = ray.remote(num_cpus=config.cpus, num_gpus=config.gpus, max_retries=0, max_calls=1)(_run_alone)

    def start(self, number: int, job: Mapping[str, Any]) -> None:
        """Submit trial `number` as a task of the cluster."""
        given = {**job, "threads": self._config.cpus, "device": self._device}
        self._running[self.task.remote(given)] = (number, str(job["log"]))

    def wait(self) -> list[tuple[int, Outcome]]:
        """Block until a task ends; its number and outcome."""
        ready, _ = self._ray.wait(list(self._running), num_returns=1)
        return [(self._running[task][0], self._outcome(task, self._running.pop(task)[1])) for task in ready]

    def _outcome(self, task: Any, log: str) -> Outcome:
        errors = self._ray.exceptions
        try:
            return dict(self._ray.get(task))
        except errors.OutOfMemoryError as error:
            return died(f"killed by Ray because the machine's memory ran out ({_first(error)})", log)
        except errors.WorkerCrashedError:
            return died("its worker process died, perhaps killed because memory ran out", log)
        except errors.RayError as error:
            return died(f"Ray gave it up ({type(error).__name__}: {_first(error)})", log)

    def close(self) -> None:
        """Cancel the tasks that still run; shut Ray down if this executor started it."""
        for task in self._running:
            self._ray.cancel(task, force=True)
        self._running.clear()
        if self._started:
            self._ray.shutdown()


def _run_alone(job: Mapping[str, Any]) -> dict[str, Any]:
    """`run_trial` in a worker of its own, which may have been started beside others."""
    for name in launcher_variables(os.environ):
        del os.environ[name]
    return run_trial(job)


def _first(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:200]
