"""Speculative decoding: drafters, verification, speculation lengths."""
