"""One run of a recipe: a loop over its stages."""
