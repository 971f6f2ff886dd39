"""Fused decoder in C for CPUs."""
