"""Acceptance rules: how much of a drafted tree is accepted."""
