"""The cache stage of a run: whether its policy is for the model, what it saves, and what must be calibrated for it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from compress.core.progress import Reporter
from compress.core.run_directory import RunDirectory
from compress.model.streamed import StreamedModel
from compress.recipe.models import Recipe
from runtime.config.settings import ConfigError
from runtime.errors import RequestError
from runtime.kv_cache.policy.calibrated import Calibrated

if TYPE_CHECKING:
    from compress.run.session import Session
    from runtime.kv_cache.policy.policy import Policy

PART = "kv_cache"


def check_cache(recipe: Recipe, streamed: StreamedModel) -> None:
    """Raise `RequestError`, with file and line, where the recipe's policy cannot be for the model."""
    stage = recipe.cache_stage
    if stage is None:
        return
    from runtime.kv_cache.policy.checks import check_module

    try:
        stage.config.check_model(streamed.config)
        check_module(streamed.model)
    except ConfigError as error:
        text = recipe.origin.at(("stages", stage.index, stage.kind, *error.path), error.text)
        raise RequestError(text) from None


def calibrated_policy(session: Session, directory: RunDirectory, reporter: Reporter) -> Policy | None:
    """The recipe's policy with all that it needs to know of the finished weights; None without a cache stage.

    It is found on the run's device, where the finished model must fit as a whole, and recorded, so that a resumed run does not look
    again.
    """
    policy = session.cache_policy
    if policy is None or not policy.missing:
        return policy
    found = directory.record(PART)
    if found is None:
        from compress.kv_cache.calibrate import calibrate

        device = session.streamed.device
        found = calibrate(directory.path, policy, _rows(session), reporter, session.recipe.seed, device=device)
        directory.commit(PART, found)
    return policy.with_calibrated(_joined(policy.calibrated, Calibrated.parse(found, ("calibrated",))))


def cache_facts(session: Session, policy: Policy | None) -> dict[str, Any] | None:
    """For plans and reports: the policy in words and in full, and the bytes of one sequence's cache; None without a policy."""
    if policy is None:
        return None
    from runtime.kv_cache.estimate import table
    from runtime.kv_cache.shape import Shape

    text = session.streamed.config.get_text_config(decoder=True)
    limit = getattr(text, "max_position_embeddings", None)
    shape = Shape.of(session.streamed.config, session.streamed.dtype)
    return {
        "method": policy.method,
        "description": policy.describe(),
        "needs": sorted(policy.missing),
        "policy": policy.resolved(),
        "bytes": table(shape, policy, limit),
    }


def _joined(known: Calibrated | None, found: Calibrated) -> Calibrated:
    """What the policy knew and what was found beside it; of another model it is of no use."""
    if known is None or not known.found:
        return found
    if known.fingerprint != found.fingerprint:
        what = ", ".join(sorted(known.found))
        text = f"the policy's {what} are of a model of fingerprint {known.fingerprint}, the finished one has {found.fingerprint}"
        raise RequestError(f"kv_cache.calibrated: {text}; leave them out, so that they are calibrated too")
    return known.joined(found)


def _rows(session: Session) -> torch.Tensor:
    """Calibration text as full rows, int64 `[n, length]`."""
    config = session.recipe.calibration
    if not config.packing:
        text = "the kv_cache stage is calibrated on full rows; set packing: true"
        raise RequestError(config.at("packing", text))
    return torch.cat([ids for ids, _ in session.calibration.batches])
