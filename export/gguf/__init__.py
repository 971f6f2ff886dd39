"""`--target gguf`: one GGUF file for llama.cpp and what is built on it.

The format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md; the blocks of its number types: `gguf.quants` of the
`gguf` package, which llama.cpp publishes. Codes and scales of the artifact are moved, never rounded anew, unless `requantize`.
"""
