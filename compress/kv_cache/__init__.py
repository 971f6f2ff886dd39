"""Offline calibration of KV-cache policies: what a cache must know of a model before the first prompt."""
