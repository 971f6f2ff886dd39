"""Foundations of every room: files, processes, units, statistics."""
