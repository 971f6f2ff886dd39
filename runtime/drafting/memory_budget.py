"""`max_memory` with a draft model: it is read before its target, so that what it takes is known when the rest is planned."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from runtime.checkpoint.artifact import Artifact
from runtime.checkpoint.headers import read_header
from runtime.drafting.config.artifact_draft import directory_drafter, own_draft
from runtime.drafting.config.registry import find_drafter
from runtime.drafting.config.target import UnfitError
from runtime.drafting.draft_cache import position_bytes
from runtime.drafting.drafters.base import Drafter
from runtime.drafting.drafters.composition import GROWTH
from runtime.drafting.drafters.draft_model import DraftModel, draft_facts, load_draft
from runtime.drafting.drafters.heads import KEPT
from runtime.drafting.speculation import Speculation
from runtime.engines.base import Engine
from runtime.engines.blueprint import Blueprint
from runtime.engines.choose import load_engine
from runtime.engines.streaming.plan import TooLittleError, text
from runtime.errors import RequestError

if TYPE_CHECKING:
    from runtime.kv_cache.policy.policy import Policy

_POSITIONS = 2048  # that a draft's cache has room for
_SHARE = 16  # of the bound it may take one part in so many, where that is more
_log = logging.getLogger("compress.speculation")


@dataclass
class Drafts:
    """Draft models that are loaded, by directory, and what all that drafts takes.

    Attributes:
        bytes: weights, and the caches of draft models.
        left_out: they do not fit, and nobody asked for them.
    """

    models: dict[str, DraftModel] = field(default_factory=dict)
    bytes: int = 0
    left_out: bool = False


def load_both(
    blueprint: Blueprint, verify: bool, max_memory: int, policy: Policy | None, drafter: Any, trust_remote_code: bool
) -> tuple[Engine, Drafts]:
    """A target, and the models that draft for it, within `max_memory` bytes together.

    Args:
        drafter: as of `runtime.load`; what the artifact brings (None) is left out where both do not fit.

    Returns:
        The engine and the drafts.

    Raises:
        RequestError: not even the least of the target fits beside what was asked for.
    """
    drafts = read_drafts(drafter, blueprint, max_memory, trust_remote_code)
    try:
        return load_engine(blueprint, verify, max_memory - drafts.bytes, policy), drafts
    except TooLittleError as error:
        if not drafts.bytes:
            raise
        sentence = (
            f"max_memory {text(max_memory)} is too little: the model needs at least {text(error.least, up=True)} and what drafts for it "
            f"{text(drafts.bytes, up=True)}"
        )
        if drafter is not None:
            raise RequestError(f"{sentence}; leave the drafter out, or raise it") from error
    _log.warning("%s: decoding goes without", sentence)
    blueprint.reset()
    return load_engine(blueprint, verify, max_memory, policy), Drafts(left_out=True)


def read_drafts(drafter: Any, blueprint: Blueprint, max_memory: int, trust_remote_code: bool) -> Drafts:
    """Load the draft models that `drafter=` names; what is wrong with it otherwise is said when the drafter is made."""
    artifact, device, found = blueprint.artifact, blueprint.device, Drafts()
    value = drafter
    if value is None:
        own = directory_drafter(artifact, device)
        value = None if own is None else own.value
    for each in _leaves(value, artifact):
        if isinstance(each, Drafter):
            found.bytes += each.memory_bytes
            continue
        facts = draft_facts(each)
        if find_drafter(facts.get("method"), "heads"):
            found.bytes += _heads_bytes(each, facts)
        elif str(each) not in found.models:
            try:
                draft = load_draft(each, artifact, device, trust_remote_code)
            except UnfitError:
                if drafter is None:  # it will be left out
                    continue
                raise
            draft.cache_bytes = _cache_bytes(draft, facts, max_memory)
            found.models[str(each)] = draft
            found.bytes += draft.engine.weight_bytes + draft.cache_bytes
    return found


def _leaves(value: Any, artifact: Artifact) -> Iterator[Path | Drafter]:
    """Directories and drafters in what `drafter=` says."""
    if value is True:
        value = own_draft(artifact)
    if isinstance(value, Speculation):
        value = value.drafter
    if isinstance(value, (list, tuple)):
        for part in value:
            yield from _leaves(part, artifact)
    elif isinstance(value, Mapping):
        yield from _leaves(value.get("of"), artifact)
        yield from _leaves(value.get("model"), artifact)
    elif isinstance(value, Drafter):
        yield value
    elif isinstance(value, (str, Path)) and Path(value).is_dir():
        yield Path(value)


def _cache_bytes(draft: DraftModel, facts: Mapping[str, Any], max_memory: int) -> int:
    """For the keys and values of a draft: some positions, or a share of the bound where that is more, but no more than it could use."""
    depths = facts.get("depths")
    caches = len(depths) if isinstance(depths, list) and depths else 1
    room = GROWTH * caches * position_bytes(draft.engine) * _POSITIONS
    return max(room, min(max_memory // _SHARE, 32 * room))


def _heads_bytes(path: Path, facts: Mapping[str, Any]) -> int:
    """Of trained heads in float32, and of the rows of the target's own head that they compute anew."""
    entries = [entry for file in path.glob("*.safetensors") for entry in read_header(file).tensors.values()]
    hidden = facts.get("hidden")
    width = {entry.name: hidden if entry.name == KEPT and isinstance(hidden, int) else 1 for entry in entries}
    return sum(4 * math.prod(entry.shape) * width[entry.name] for entry in entries)
