"""Solvers: from float weights and what calibration knows about their inputs to compressed weights."""

from __future__ import annotations

from compress.solver.group import LayerResult, solve_group

__all__ = ["LayerResult", "solve_group"]
