"""Selections: tokens that a decoding step reads, one file each."""
