"""Training loop that recovery and drafts share."""
