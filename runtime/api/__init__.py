"""Models that `runtime.load` returns."""
