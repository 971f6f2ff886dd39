"""Storage codecs of keys and values, one file each."""
