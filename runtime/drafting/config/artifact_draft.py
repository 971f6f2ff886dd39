"""What a directory brings to draft with, where nobody says anything: the choice that was measured, or its own draft."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch

from runtime.checkpoint.artifact import MANIFEST, Artifact
from runtime.config.fields import found
from runtime.drafting.config.measured_choice import read_choice
from runtime.errors import RequestError


class Brought(NamedTuple):
    """What it is, as `drafter=` takes it (False: nothing is faster), and what messages call it."""

    value: Any
    where: str


def brought(artifact: Artifact, device: torch.device) -> Brought | None:
    """What a directory says it is decoded with on a device; None: nothing.

    Raises:
        RequestError, ArtifactError: what it says is damaged.
    """
    choice = read_choice(artifact, device)
    if choice is not None:
        return Brought(choice.value, f"{choice.file}: drafter")
    own = own_draft(artifact)
    return None if own is None else Brought(own, place_of(artifact))


def place_of(artifact: Artifact) -> str:
    """What messages call an artifact's own draft."""
    return f"{artifact.path / MANIFEST}: draft"


def own_draft(artifact: Artifact) -> dict[str, Any] | None:
    """The drafter of an artifact, whose model lies inside it; None: it brings none."""
    written = (artifact.manifest or {}).get("draft")
    if written is None:
        return None
    place = artifact.path / MANIFEST
    if not isinstance(written, Mapping) or not isinstance(written.get("drafter"), Mapping):
        raise RequestError(f"{place}: draft must be an object with a drafter, not {found(written)}")
    value = dict(written["drafter"])
    if "model" in value:
        path = Path(str(value["model"]))
        if (
            path.is_absolute()
            or ".." in path.parts
            or not (artifact.path / path).resolve().is_relative_to(artifact.path.resolve())
        ):
            raise RequestError(
                f"{place}: draft.drafter.model must be a directory inside the artifact, not {str(path)!r}"
            )
        value["model"] = str(artifact.path / path)
    return value
