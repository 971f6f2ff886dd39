"""Policies of speculation length, one file each."""
