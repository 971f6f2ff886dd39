"""Triton kernels for NVIDIA GPUs (compute capability 8.0 and later; float8 from 8.9).

Each file holds a kernel and its wrapper. Importing this package does not import triton; importing a file with a
kernel does, where it is installed (`jit.py`); where it is not, kernels that an export compiled ahead are launched (`aot.py`).
`linear.py` has the classes for the dispatch table. The kernels also run on CPU tensors under `TRITON_INTERPRET=1`
(set before triton is imported), which is how the tests check them where there is no GPU.
"""
