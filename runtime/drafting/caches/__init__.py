"""Caches of draft models."""
