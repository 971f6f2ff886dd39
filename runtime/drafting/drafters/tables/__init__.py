"""Token statistics that drafters without weights draft from."""
