"""One module a command, each with `register(app)`; torch is imported inside the functions, so that `--help` is quick."""
