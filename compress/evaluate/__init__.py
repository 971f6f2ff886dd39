"""Quality of a model: perplexity, KL divergence and agreement with a reference on text; lm-eval's tasks through the extra."""

from compress.evaluate.metrics import TokenMetrics

__all__ = ["TokenMetrics"]
