"""Version of compress, as artifacts and result files name it."""

VERSION = "0.1.0"
