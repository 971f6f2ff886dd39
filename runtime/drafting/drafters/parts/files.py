"""The directory of heads that were trained on a target: draft.json and one safetensors file.

draft.json:
    schema_version  1
    method          "medusa" or "mtp"
    target          fingerprint of the checkpoint they were trained on
    vocabulary      its ids are below this
    hidden          width of its hidden states
    heads           sizes of the modules, as their builders read them
    rates           how often proposals are right, measured: Medusa by depth and rank, else by depth
    facts           what else was measured, plain data
    files           {name: {"bytes", "sha256"}} of all others

heads.safetensors: the modules' weights by name, and, of heads that propose only some tokens, "kept_tokens", int32 `[k]`, ascending.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from runtime.checkpoint.artifact import Artifact
from runtime.checkpoint.headers import read_header
from runtime.drafting.config.target import other_target
from runtime.drafting.drafters.parts.target import TargetParts
from runtime.errors import ArtifactError, RequestError

WEIGHTS = "heads.safetensors"
KEPT = "kept_tokens"
METHODS = ("medusa", "mtp")
SCHEMA_VERSION = 1


@dataclass
class HeadFiles:
    """What a directory holds.

    Attributes:
        path: the directory. facts: draft.json.
        weights: by name, on the CPU.
        kept: int64 `[k]`, the target's id of each token that is proposed; None: all.
    """

    path: Path
    facts: Mapping[str, Any]
    weights: dict[str, torch.Tensor]
    kept: torch.Tensor | None

    def size(self, name: str, least: int = 1) -> int:
        """A number of `heads` in draft.json."""
        sizes = self.facts.get("heads")
        value = sizes.get(name) if isinstance(sizes, Mapping) else None
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise ArtifactError(
                f"{self.path / 'draft.json'}: heads.{name} must be an integer of at least {least}, not {value!r}"
            )
        return value

    def fill(self, module: nn.Module) -> None:
        """Put the weights into a module (on meta) of the sizes that draft.json says; ArtifactError where they are others."""
        expected = module.state_dict()
        for name, value in expected.items():
            stored = self.weights.get(name)
            if stored is None:
                raise ArtifactError(f"{self.path / WEIGHTS} has no tensor {name}")
            if stored.shape != value.shape or not stored.is_floating_point():
                raise ArtifactError(
                    f"{self.path / WEIGHTS}: tensor {name} is {stored.dtype} {list(stored.shape)}, expected {list(value.shape)}"
                )
        module.load_state_dict({name: self.weights[name] for name in expected}, assign=True)
        module.requires_grad_(False)


def read_heads(path: Path, facts: Mapping[str, Any], method: str, target: Artifact, parts: TargetParts) -> HeadFiles:
    """Read heads of a target.

    Args:
        path: the directory. facts: its draft.json.
        method: that they must be of.
        target: what they shall propose for. parts: of its engine.

    Raises:
        RequestError: they are another target's, or of another method. ArtifactError: they cannot be read.
    """
    if facts.get("schema_version") != SCHEMA_VERSION or facts.get("method") != method:
        raise RequestError(
            f"drafter: {path} holds {facts.get('method')!r} of schema version {facts.get('schema_version')!r}, expected {method!r} of "
            f"{SCHEMA_VERSION}"
        )
    own = facts.get("target")
    if own != target.checkpoint.fingerprint():
        raise other_target(path, own, target)
    for name, size in (("vocabulary", parts.vocabulary), ("hidden", parts.hidden)):
        if facts.get(name) != size:
            raise RequestError(
                f"drafter: {path} is for a {name} size of {facts.get(name)}, and {target.path} has {size}"
            )
    if not (path / WEIGHTS).is_file():
        raise ArtifactError(f"drafter: {path} has no {WEIGHTS}")
    read_header(path / WEIGHTS)  # says in a sentence what is wrong with a damaged file
    from safetensors.torch import load_file

    weights = load_file(path / WEIGHTS)
    return HeadFiles(path, facts, weights, _kept(weights.pop(KEPT, None), path, parts.vocabulary))


def rates_of(facts: Mapping[str, Any], depths: int) -> list[list[float]]:
    """The measured rates by depth and rank; ArtifactError where they are not there."""
    stored = facts.get("rates")
    levels: list[Any] = stored if isinstance(stored, list) else []
    if len(levels) != depths or not all(
        isinstance(ranks, list) and ranks and all(map(_rate, ranks)) for ranks in levels
    ):
        raise ArtifactError(f"draft.json: rates must be {depths} lists of numbers from 0 to 1, one for each head")
    return [[float(value) for value in ranks] for ranks in levels]


def _rate(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 <= value <= 1


def _kept(ids: torch.Tensor | None, path: Path, vocabulary: int) -> torch.Tensor | None:
    if ids is None:
        return None
    whole = ids.dtype == torch.int32 and ids.dim() == 1 and len(ids) > 0
    if not whole or int(ids[0]) < 0 or int(ids[-1]) >= vocabulary or not bool((ids.diff() > 0).all()):
        raise ArtifactError(f"{path / WEIGHTS}: {KEPT} must be ascending int32 ids below {vocabulary}")
    return ids.long()
