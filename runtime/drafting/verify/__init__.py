"""Acceptance rules: what of a drafted tree becomes text."""
