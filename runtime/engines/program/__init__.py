"""Programs of typed operations: decoders, read off transformers' modules, in a form that native engines run."""
