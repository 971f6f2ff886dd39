"""Scores of tokens for eviction, one file each."""
