"""Decoding loop: scheduler, pages, requests."""
