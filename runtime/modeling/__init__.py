"""Transformers models without weights: skeletons, names, experts."""
