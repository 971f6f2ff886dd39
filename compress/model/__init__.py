"""Checkpoint of a model, streamed one block at a time."""
