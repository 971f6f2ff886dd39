"""Sampling options, logits to tokens, stopping, statistics."""
