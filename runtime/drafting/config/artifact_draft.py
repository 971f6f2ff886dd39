"""Draft that a directory brings: the artifact's own, or `drafter.json`, the drafter that was measured to be fastest.

drafter.json:
    schema_version  1
    drafter         what `runtime.load` takes: names of drafters, true (the artifact's own), {"of": [...]}, settings, or false (none)
    fingerprint     of the weights it was measured with. draft: of the artifact's own draft, null where it has none
    machine         the CPU or the GPU
    measured        what was measured, for people
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch

from runtime.checkpoint.artifact import MANIFEST, Artifact
from runtime.checkpoint.checkpoint import read_json
from runtime.config.messages import show
from runtime.config.settings import ConfigError
from runtime.drafting.config.registry import find_drafter
from runtime.errors import RequestError
from runtime.system import processes

CHOICE = "drafter.json"
SCHEMA_VERSION = 1
_log = logging.getLogger("compress.speculation")


class DirectoryDrafter(NamedTuple):
    """What a directory is decoded with, as `drafter=` takes it (False: nothing is faster), and what messages call it."""

    value: Any
    where: str


def choice_content(value: Any, artifact: Artifact, device: torch.device, measured: Any = None) -> dict[str, Any]:
    """The content of drafter.json.

    Args:
        value: the drafter, as `drafter=` takes it; False: none.
        artifact: that it was measured with. device: that it was measured on.
        measured: plain data.

    Raises:
        ConfigError: `value` names a directory.
    """
    try:
        _check(value)
    except ConfigError as error:
        raise error.at(CHOICE) from None
    return {"schema_version": SCHEMA_VERSION, "drafter": value, **_facts(artifact, device), "measured": measured}


def read_choice(artifact: Artifact, device: torch.device) -> DirectoryDrafter | None:
    """What was found to be fastest for a directory; None where it says nothing, or says it of other weights or another machine.

    Args:
        artifact: the directory as it is now. device: that computes.

    Raises:
        ArtifactError: the file cannot be read. ConfigError: it names what it must not.
    """
    file = artifact.path / CHOICE
    if not file.is_file():
        return None
    content = read_json(file)
    if content.get("schema_version") != SCHEMA_VERSION:
        _log.warning("%s is of schema version %r and is not used", file, content.get("schema_version"))
        return None
    other = [key for key, value in _facts(artifact, device).items() if key not in content or content[key] != value]
    if other:
        said = {"fingerprint": "other weights", "draft": "another draft", "machine": "another machine"}[other[0]]
        _log.warning("%s was measured with %s and is not used; measure again: compress bench --drafters", file, said)
        return None
    value = content.get("drafter")
    try:
        _check(value)
    except ConfigError as error:
        raise error.at(str(file)) from None
    return DirectoryDrafter(value if value is not None else False, f"{file}: drafter")


def _facts(artifact: Artifact, device: torch.device) -> dict[str, Any]:
    """What a choice holds for."""
    draft = (artifact.manifest or {}).get("draft")
    own = None if draft is None else hashlib.sha256(json.dumps(draft, sort_keys=True).encode()).hexdigest()
    fingerprint = artifact.checkpoint.fingerprint()
    scheme = None if artifact.manifest is not None else artifact.config.get("quantization_config")
    if scheme is not None:  # of a checkpoint rounded while loading, whose files say nothing of it
        fingerprint += f" {hashlib.sha256(json.dumps(scheme, sort_keys=True).encode()).hexdigest()}"
    return {"fingerprint": fingerprint, "draft": own, "machine": machine(device)}


def machine(device: torch.device) -> str:
    """What computes, by its maker's name."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    names = [line.partition(":")[2].strip() for line in processes.facts("model name")]
    return ", ".join(names) or processes.identity().replace("\n", ", ")


def _check(value: Any) -> None:
    """A choice names drafters of this package and the artifact's own, never a directory somewhere else."""
    if value is None or value is False or value is True:
        return
    if isinstance(value, str) and find_drafter(value, "text", "target"):
        return
    if isinstance(value, Mapping) and value.get("model", True) is True:
        parts = value.get("of", ())
        for part in parts if isinstance(parts, (list, tuple)) else ():
            _check(part)
        return
    raise ConfigError((), f"expected names of drafters, true (the artifact's own) or {{of: [...]}}, got {show(value)}")


def directory_drafter(artifact: Artifact, device: torch.device) -> DirectoryDrafter | None:
    """What a directory says it is decoded with on a device; None: nothing.

    Raises:
        RequestError, ArtifactError: what it says is damaged.
    """
    choice = read_choice(artifact, device)
    if choice is not None:
        return choice
    own = own_draft(artifact)
    return None if own is None else DirectoryDrafter(own, place_of(artifact))


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
        raise RequestError(f"{place}: draft must be an object with a drafter, not {show(written)}")
    value = dict(written["drafter"])
    if "model" in value:
        path = Path(str(value["model"]))
        inside = (artifact.path / path).resolve().is_relative_to(artifact.path.resolve())
        if path.is_absolute() or ".." in path.parts or not inside:
            raise RequestError(
                f"{place}: draft.drafter.model must be a directory inside the artifact, not {str(path)!r}"
            )
        value["model"] = str(artifact.path / path)
    return value
