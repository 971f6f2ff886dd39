"""Executors of trials: `processes` on this machine, `ray_cluster` on a Ray cluster. Both run `compress.sweeps.trial.run_trial`."""

from __future__ import annotations

from compress.sweeps.directory import SweepDirectory
from compress.sweeps.executors.base import Executor, Outcome
from compress.sweeps.models import Sweep


def choose(sweep: Sweep, directory: SweepDirectory, device: str) -> Executor:
    """A Ray cluster where the sweep names one, else processes on this machine."""
    if sweep.ray is not None:
        from compress.sweeps.executors.ray_cluster import RayExecutor

        return RayExecutor(sweep.ray, device)
    from compress.sweeps.executors.processes import ProcessExecutor

    return ProcessExecutor(sweep.file.jobs, directory, device)


__all__ = ["Executor", "Outcome", "choose"]
