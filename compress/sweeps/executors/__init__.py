"""Executors of trials: `processes` on this machine, `ray_cluster` on a Ray cluster. Both run `compress.sweeps.trial.run_trial`."""

from compress.sweeps.executors.base import Executor, Outcome
from compress.sweeps.executors.choose import choose

__all__ = ["Executor", "Outcome", "choose"]
