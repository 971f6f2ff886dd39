"""`--target triton`: an artifact with its GPU kernels compiled ahead, for machines without a compiler; see `target.py`."""
