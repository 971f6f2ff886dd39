"""Published methods by name (`presets.yaml`): each is a combination of the axes, whose keys a policy may override."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from runtime.config.messages import plain


@dataclass(frozen=True)
class Preset:
    """One published method.

    Attributes:
        name: as policies say it.
        summary: one line.
        paper: where it comes from.
        settings: keys of a policy.
    """

    name: str
    summary: str
    paper: str
    settings: Mapping[str, Any]


_FILE = Path(__file__).with_suffix(".yaml")
PRESETS: dict[str, Preset] = {
    name: Preset(name, **facts) for name, facts in yaml.safe_load(_FILE.read_text(encoding="utf-8")).items()
}
_BY_PLAIN_NAME = {plain(name): preset for name, preset in PRESETS.items()}


def find_preset(name: str) -> Preset | None:
    """By name; case, hyphens and underscores do not count."""
    return _BY_PLAIN_NAME.get(plain(name))
