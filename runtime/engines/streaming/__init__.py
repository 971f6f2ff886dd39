"""Prepared weights, laid out for the kernels and cached on disk: mapped by later loads, or read block by block while others compute.

`cache.py` keeps one file for each artifact and layout (`contents` and `clear` are for users), `prepared_file.py` is its format, `load.py`
makes it, checks it and gives a model its tensors, `program_file.py` stores the program that runs on it. `plan.py` and `ring.py` stream
blocks of models that are larger than the memory they may take; `engine.py` has the engines that run so.
"""

from runtime.engines.streaming.cache import clear, contents

__all__ = ["clear", "contents"]
