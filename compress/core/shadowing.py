"""Packages of this distribution that a module of the user shadows: a `runtime.py` where Python looks first."""

from __future__ import annotations

import sys
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

_OURS = {"runtime": "api", "export": "targets.py"}  # and what in each tells it from another of its name


def import_neighbours() -> None:
    """Import `runtime` and `export` where another module would be taken for one of them.

    `python -m compress` looks in the working directory first; nobody means that directory's modules there, so it is passed over.

    Raises:
        ImportError: in a program that imports this package; the sentence names the file that shadows a package. A command line
            prints it and ends with exit code 2.
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
    """The module that would be imported in the place of ours; None where that is ours."""
    spec = find_spec(name)
    if spec is None:  # nothing is there, which whoever imports it says
        return None
    places = list(spec.submodule_search_locations or ())
    return None if any((Path(place) / _OURS[name]).exists() for place in places) else str(spec.origin or places[0])
