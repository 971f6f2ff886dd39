"""Training: losses, recovery of a compressed model, draft models and heads. No method is in here yet."""
