"""How to install what an optional part of this package needs.

By the names of the packages, not as `compress[extra]`: who has this package from its repository would be given another one of that name
from the index.
"""

from __future__ import annotations

import shlex
from importlib import metadata

PACKAGE = "compress"


def how_to_install(extra: str) -> str:
    """A command line: `pip install 'optuna>=5'`."""
    found = requirements(extra)
    if not found:
        return f"pip install -e '.[{extra}]' in a checkout of {PACKAGE}"
    return f"pip install {' '.join(map(shlex.quote, found))}"


def requirements(extra: str) -> list[str]:
    """What an extra asks for on this machine, other extras in it spelled out; empty where the installed package does not say."""
    from packaging.requirements import Requirement

    try:
        stated = [Requirement(text) for text in metadata.requires(PACKAGE) or []]
    except metadata.PackageNotFoundError:
        return []
    found: dict[str, None] = {}
    for requirement in stated:
        if requirement.marker is None or not requirement.marker.evaluate({"extra": extra}):
            continue
        if requirement.name == PACKAGE:
            found |= dict.fromkeys(text for other in sorted(requirement.extras) for text in requirements(other))
        else:
            requirement.marker = None
            found[str(requirement)] = None
    return list(found)
