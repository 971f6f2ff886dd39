"""Quality of an artifact as it will run: with its compressed cache, against the same artifact with a plain one."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from compress.core.progress import Reporter
from compress.core.run_directory import RunDirectory
from compress.evaluate.through_cache import through_cache
from compress.run.manifest import held_to
from compress.run.plan import MEMORY_SHARE
from compress.run.session import Session
from runtime.api.model import Model
from runtime.checkpoint.artifact import Artifact
from runtime.engines.choose import choose_engine
from runtime.engines.torch.engine import Blueprint
from runtime.system.memory import available_bytes
from runtime.system.sizes import size

if TYPE_CHECKING:
    from runtime.kv_cache.policy.policy import Policy

# Limits that hold for weights and cache together, and what they are called there.
_OVERALL = {"max_perplexity": "max_perplexity_overall", "max_perplexity_increase": "max_perplexity_increase_overall"}


def evaluate_cache(
    session: Session,
    directory: RunDirectory,
    windows: torch.Tensor | None,
    policy: Policy | None,
    metrics: dict[str, Any],
    reporter: Reporter,
) -> dict[str, Any]:
    """`metrics` with the quality of the artifact as it will run, its keys and values held as `policy` says; as they are without one.

    What follows prompts is scored with the compressed and with a plain cache, on the run's device, where the finished model must fit as a
    whole. `perplexity_increase_overall` is what weights and cache cost together: the increase of whole windows times the cache's, which
    is measured a token of the artifact's and counts for as many of them as are as much text as one of the source's. The limits on
    perplexity hold for it too. Where the model does not fit, the cache is not measured, which these limits do not forgive.
    """
    config = session.recipe.evaluate
    if config is None or windows is None or policy is None or "after" not in metrics:
        return metrics
    limits = {name: limit for name, limit in config.limits().items() if name in _OVERALL}
    artifact = Artifact(directory.path)
    reason = too_large(session, artifact.checkpoint.total_bytes)
    if reason:
        if reason not in reporter.warnings:  # known before the run began
            reporter.warn(reason)
        failed = [
            {"name": _OVERALL[name], "limit": limits[name], "value": None, "ok": False} for name in sorted(limits)
        ]
        return metrics | {"kv_cache": {"warning": reason}, "limits": metrics["limits"] + failed}
    # The manifest is not there yet, so this is what `runtime.load` does after it has looked for one.
    blueprint = Blueprint(artifact, session.streamed.device, "auto", None, False)
    # Where tokens lie changes no number, and the machine that compresses need not be the one that offloads.
    policy = replace(policy, offload=None)
    model = Model(choose_engine(blueprint.build(), blueprint, policy), None, artifact, frozenset())
    # Prefix tokens of a policy take places of the context.
    found = through_cache(model, windows[:, : model.engine.context_length], config.batch_size, reporter)
    if "warning" in found["kv_cache"]:
        reporter.warn(found["kv_cache"]["warning"])
    factor = (1.0 + found["perplexity_increase_with_cache"]) ** metrics.get("tokens_each", 1.0)
    overall = (1.0 + metrics["perplexity_increase"]) * factor - 1.0
    values = {
        _OVERALL["max_perplexity"]: metrics["after"]["perplexity"] * factor, _OVERALL["max_perplexity_increase"]: overall,
    }  # fmt: skip
    checked = held_to(values, {_OVERALL[name]: limit for name, limit in limits.items()})
    return metrics | found | {"perplexity_increase_overall": overall, "limits": metrics["limits"] + checked}


def too_large(session: Session, count: int) -> str:
    """Why the cache of an artifact of `count` bytes cannot be measured on the run's device; empty: it can, or there is nothing to do."""
    if session.cache_policy is None or session.recipe.evaluate is None:
        return ""
    if count <= MEMORY_SHARE * available_bytes(session.streamed.device):
        return ""
    return (
        f"the quality of the compressed cache is not measured, which takes the finished model as a whole: {size(count)}, "
        "more than is free; measure it on a larger machine with `compress eval`"
    )
