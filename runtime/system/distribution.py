"""The installed distribution: its version, and how to install its optional parts."""

from __future__ import annotations

from importlib import metadata

#: The whole toolchain; the runtime alone. (`compress` on PyPI is another project.)
NAMES = ("compress-checkpoints", "compress-checkpoints-runtime")


def installed() -> metadata.Distribution | None:
    """The distribution that holds this package; None in a source tree that was never installed."""
    for name in NAMES:
        try:
            return metadata.distribution(name)
        except metadata.PackageNotFoundError:
            continue
    return None


def how_to_install(extra: str) -> str:
    """Command line that adds an extra to this installation: `pip install 'compress-checkpoints[sweep]'`.

    pip finds the distribution already installed and adds the dependencies of the extra.
    """
    found = installed()
    if found is not None and extra in (found.metadata.get_all("Provides-Extra") or ()):
        return f"pip install '{found.metadata['Name']}[{extra}]'"
    return f"pip install -e '.[{extra}]' in a checkout of compress"
