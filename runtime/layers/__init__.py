"""Compressed layers and their installation into a model."""
