"""Quality of a model: perplexity, KL divergence and agreement with a reference on text; lm-eval's tasks through the extra."""

from compress.evaluate.evaluate import evaluate, parameter_count, sizes
from compress.evaluate.lm_eval import evaluate_tasks
from compress.evaluate.metrics import TokenMetrics

__all__ = ["TokenMetrics", "evaluate", "evaluate_tasks", "parameter_count", "sizes"]
