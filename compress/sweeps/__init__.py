"""Sweeps: one recipe with many values, tried one after the other or side by side, and what each costs and wins.

`load_sweep` reads a sweep file, `run.sweep` carries it out. A trial is one `apply` in a process of its own
(`compress.sweeps.trial`); an executor (`compress.sweeps.executors`) says where, a search (`grid`, `study`) says with which values.
"""

from compress.sweeps.pareto import pareto_front
from compress.sweeps.reading import find_sweep, load_sweep

__all__ = ["find_sweep", "load_sweep", "pareto_front"]
