"""Registry and reader of settings for cache policies and drafters."""
