"""Engine that runs transformers' modules."""
