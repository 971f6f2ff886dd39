"""Kernels for CPUs, made of torch's own int4 and int8 operators."""
