"""Kernels for CPUs: in C, and through torch's int4 and int8 operators."""
