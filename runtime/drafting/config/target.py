"""What is drafted for, and that a drafter does not fit it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from runtime.checkpoint.artifact import Artifact
from runtime.config.fields import PolicyError
from runtime.errors import RequestError

if TYPE_CHECKING:
    from runtime.drafting.drafters.draft_model import DraftModel

SHOWN = 12  # characters of a fingerprint: as many as tell two of them apart


@dataclass
class Target:
    """What is drafted for.

    Attributes:
        artifact: its directory. engine: computes it.
        trust_remote_code: of drafts too.
        lenient: nobody asked for the drafter: a draft whose method does not fit the engine is used in a plainer way.
        drafts: draft models that are loaded already, by directory.
    """

    artifact: Artifact
    engine: Any
    trust_remote_code: bool = False
    lenient: bool = False
    drafts: Mapping[str, DraftModel] = field(default_factory=dict)


class UnfitError(PolicyError):
    """A drafter with which nothing is wrong, but for the engine, the machine or the memory that it would have."""

    def at(self, where: str) -> UnfitError:
        return UnfitError(self.path, self.text, where)


def other_target(path: Path, own: Any, target: Artifact) -> RequestError:
    """What is said of a draft whose fingerprint of its target, `own`, is not that of this one."""
    theirs, mine = str(own)[:SHOWN], target.checkpoint.fingerprint()[:SHOWN]
    return RequestError(
        f"drafter: {path} is a draft of another target: it was made for fingerprint {theirs}, and that of {target.path} is {mine}; "
        "`compress draft` makes one for it"
    )
