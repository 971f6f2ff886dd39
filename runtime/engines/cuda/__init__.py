"""Fused GPU engine: Llama-like decoders over a static paged KV cache, decode steps replayed as CUDA graphs.

`engine.py` is what others use. Importing this package imports neither triton nor transformers.
"""

from runtime.engines.cuda.engine import CudaEngine, take_over

__all__ = ["CudaEngine", "take_over"]
