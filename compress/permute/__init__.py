"""Permutations of a model's channels, which keep its function and are folded into the weights."""
