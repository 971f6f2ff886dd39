"""Solvers: from float weights and what calibration knows about their inputs to compressed weights.

`compress.weights.solver.group.solve_group` is the entrance. Nothing is imported here, because the methods that `group` looks up in the
registries use the solver's own parts (the output error, the column loop).
"""
