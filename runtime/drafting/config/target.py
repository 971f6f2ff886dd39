"""Target of a drafter, and the error for one that does not fit it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from runtime.checkpoint.artifact import Artifact
from runtime.config.settings import ConfigError
from runtime.errors import RequestError

SHOWN = 12  # characters of a fingerprint: as many as tell two of them apart


@dataclass
class Target:
    """What is drafted for.

    Attributes:
        artifact: its directory. engine: computes it.
        trust_remote_code: of drafts too.
        lenient: nobody asked for the drafter: a draft whose method does not fit the engine is used in a plainer way.
        drafts: draft models that are loaded already, by directory (`runtime.drafting.drafters.draft_model.DraftModel`).
    """

    artifact: Artifact
    engine: Any
    trust_remote_code: bool = False
    lenient: bool = False
    drafts: Mapping[str, Any] = field(default_factory=dict)


class UnfitError(ConfigError):
    """A drafter with which nothing is wrong, but for the engine, the machine or the memory that it would have."""


def check_fingerprint(path: Path, facts: Mapping[str, Any], target: Artifact) -> None:
    """RequestError where a draft, whose draft.json holds these facts, was made for another target."""
    own, mine = facts.get("target"), target.checkpoint.fingerprint()
    if own != mine:
        raise RequestError(
            f"drafter: {path} is a draft of another target: it was made for fingerprint {str(own)[:SHOWN]}, and that of {target.path} is "
            f"{mine[:SHOWN]}; `compress draft` makes one for it"
        )
