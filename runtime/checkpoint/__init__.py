"""Artifacts, checkpoints and exports on disk."""
