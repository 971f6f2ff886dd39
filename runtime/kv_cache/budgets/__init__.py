"""Budgets: shares of the cache by layer and head, one file each."""
