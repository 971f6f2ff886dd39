"""Packages of this distribution that a user's module shadows, such as a `runtime.py` earlier on the path."""

from __future__ import annotations

import sys
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

_OURS = {"runtime": "api", "export": "targets.py"}  # and a file by which ours is recognized


def import_neighbours() -> None:
    """Import `runtime` and `export` even if other modules of these names come first.

    `python -m compress` puts the working directory first on the path; modules there are ignored.

    Raises:
        ImportError: names the file that shadows a package, in a program that imports this one. The command line prints the
            message and exits with code 2 instead.
    """
    if all(_shadow(name) is None for name in _OURS):
        return
    program, first = Path(sys.argv[0]).stem if sys.argv else "", sys.path[:1]
    passed_over = program == "-m" and [Path(place).resolve() for place in first] == [Path.cwd()]
    if passed_over:
        del sys.path[0]
    try:
        for name in _OURS:
            if (shadow := _shadow(name)) is not None:
                text = f"{shadow} shadows the package {name} of compress: rename it, or start from another directory"
                if program in ("-m", "compress"):
                    print(f"compress: {text}", file=sys.stderr)
                    raise SystemExit(2)
                raise ImportError(text)
            import_module(name)
    finally:
        if passed_over:
            sys.path[:0] = first


def _shadow(name: str) -> str | None:
    """The module that would be imported instead of ours; None if it is ours."""
    spec = find_spec(name)
    if spec is None:  # not installed: the import itself reports it
        return None
    places = list(spec.submodule_search_locations or ())
    return None if any((Path(place) / _OURS[name]).exists() for place in places) else str(spec.origin or places[0])
