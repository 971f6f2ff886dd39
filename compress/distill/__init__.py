"""Training: the loop, recovery of quality, draft models and heads."""
