"""Engines: tokens to logits over a pool of cache pages, one folder each."""
