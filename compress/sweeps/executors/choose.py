"""The executor that a sweep asks for."""

from __future__ import annotations

from compress.sweeps.directory import SweepDirectory
from compress.sweeps.executors.base import Executor
from compress.sweeps.models import Sweep


def choose(sweep: Sweep, directory: SweepDirectory, device: str) -> Executor:
    """A Ray cluster where the sweep names one, else processes on this machine."""
    if sweep.ray is not None:
        from compress.sweeps.executors.ray_cluster import RayExecutor

        return RayExecutor(sweep.ray, device)
    from compress.sweeps.executors.processes import ProcessExecutor

    return ProcessExecutor(sweep.file.jobs, directory, device)
