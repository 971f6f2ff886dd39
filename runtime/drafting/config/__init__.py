"""Settings of drafters, and the drafters built from them."""
