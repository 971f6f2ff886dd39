"""Cache policies: parsing, checks, presets."""
