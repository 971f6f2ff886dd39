"""Weights as kernels read them, kept on disk: mapped into memory by later loads, or read block by block while others compute.

`cache.py` keeps one file for each artifact and layout (`contents` and `clear` are for users), `file.py` is its format, `build.py`
makes it, `expected.py` says what it must hold, `load.py` gives a model its tensors. `plan.py`, `reader.py`, `ring.py`, `slots.py`
stream blocks of models that are larger than the memory they may take; `hooks.py` and `llama.py` are the engines that run so.
"""

from runtime.engines.streaming.cache import clear, contents

__all__ = ["clear", "contents"]
