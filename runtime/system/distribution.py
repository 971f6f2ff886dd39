"""The installed distribution: its version, and how to install its optional parts."""

from __future__ import annotations

import shlex
from importlib import metadata

NAMES = ("compress", "compress-runtime")  # the whole toolchain, the runtime alone


def installed() -> metadata.Distribution | None:
    """The distribution that holds this package; None in a source tree that was never installed."""
    for name in NAMES:
        try:
            return metadata.distribution(name)
        except metadata.PackageNotFoundError:
            continue
    return None


def how_to_install(extra: str) -> str:
    """Command line that installs an extra: `pip install 'optuna>=5'`.

    It names the packages and not `compress[extra]`: an install from a checkout would be replaced by the package of that name on the index.
    """
    found = requirements(extra)
    if not found:
        return f"pip install -e '.[{extra}]' in a checkout of {NAMES[0]}"
    return f"pip install {' '.join(map(shlex.quote, found))}"


def requirements(extra: str) -> list[str]:
    """Requirements of an extra on this machine, extras in it spelled out; empty where the distribution has no such extra."""
    from packaging.requirements import Requirement

    distribution = installed()
    found: dict[str, None] = {}
    for requirement in map(Requirement, (distribution.requires or []) if distribution else []):
        if requirement.marker is None or not requirement.marker.evaluate({"extra": extra}):
            continue
        if requirement.name in NAMES:
            found |= dict.fromkeys(text for other in sorted(requirement.extras) for text in requirements(other))
        else:
            requirement.marker = None
            found[str(requirement)] = None
    return list(found)
