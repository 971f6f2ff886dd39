"""KV-cache compression: score (which tokens matter) x budget (how many a head keeps) x storage (how they are held) x selection
(which of them a step reads)."""
