"""From an artifact to the files of other engines, one file (or folder) a target. No target is in here yet.

Compressed-tensors formats need no export: such an artifact is read as it is by transformers, vLLM and SGLang.
"""
