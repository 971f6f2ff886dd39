"""Hugging Face checkpoints that vLLM, SGLang and transformers serve without this package: compressed-tensors, or GPTQ."""
