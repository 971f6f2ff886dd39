"""Block pass that pruning and quantization share."""
