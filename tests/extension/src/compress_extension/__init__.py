"""Extensions of compress that live in a package of their own, one a file; `pyproject.toml` registers them."""
